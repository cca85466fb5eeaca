"""Options of these tests: which architectures or adapters, and whether to renew the table of what was found."""

from __future__ import annotations

import pytest
from found import Found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("architectures")
    group.addoption(
        "--model", action="append", default=[], help="only this model file of mlx-lm, or adapter; may be repeated"
    )
    group.addoption("--write-models", action="store_true", help="renew docs/models.json and docs/models.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A tox environment's name will do: its last part is the model's.
    wanted = [name.rpartition("-")[2] if name.startswith("py") else name for name in config.getoption("--model")]
    if not wanted:
        return
    tested = {item: tested_by(item) for item in items}
    kept = [item for item in items if tested[item] & set(wanted)]
    missing = set(wanted).difference(*tested.values())
    if missing:
        raise pytest.UsageError(f"no test of {', '.join(sorted(missing))}")
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def tested_by(item: pytest.Item) -> set[str]:
    """The model file that a test is of, if it is of one of them all, or the module of the adapter."""
    model = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    module = item.path.stem.removeprefix("test_")
    return {model} if module == "architectures" else {module}


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest) -> Found:
    return request.config.stash.setdefault(_FOUND, Found())


def pytest_sessionfinish(session: pytest.Session) -> None:
    result = session.config.stash.get(_FOUND, None)
    if result is not None and session.config.getoption("--write-models"):
        result.write()


_FOUND = pytest.StashKey[Found]()
