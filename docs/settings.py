"""The table of settings as Markdown, made from KVCacheConfig. ``python docs/settings.py`` renews it in README.md."""

from __future__ import annotations

import re
from pathlib import Path

from tinykv_plugin.config import KVCacheConfig, allowed

README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"(?<=<!-- settings -->\n).*(?=<!-- /settings -->)", re.DOTALL)


def settings_table() -> str:
    """One row per setting."""
    rows = ["| setting | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for name, field in KVCacheConfig.model_fields.items():
        default = "unset" if field.default is None else f"`{str(field.default).lower()}`"
        rows.append(f"| `{name}` | {default} | {allowed(name)} | {field.description} |")
    return "\n".join(rows) + "\n"


def renewed(readme: str) -> str:
    """``readme`` with the table between its markers replaced."""
    assert MARKED.search(readme), "the markers are gone"
    return MARKED.sub(lambda _: settings_table(), readme)


if __name__ == "__main__":
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
