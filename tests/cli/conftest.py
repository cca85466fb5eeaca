"""A tiny model on disk that ``mlx_lm.load`` reads without a network, and ways to call the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEXT = "the a page of keys and values holds tokens in slots while one table maps them to memory so that"
WORDS = TEXT.split()
CHAT_TEMPLATE = (
    "{% for message in messages %}<u> {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclasses.dataclass
class Outcome:
    """What a command returned and wrote."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not folded, however many plugins are installed."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def tinykv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``tinykv("generate", "--help")`` in this process."""
    from tinykv_plugin.cli.main import main

    def call(*argv: str) -> Outcome:
        capsys.readouterr()
        code = main(argv)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Outcome]:
    """``python("-m", "tinykv_plugin", …)`` in a process of its own, in an empty folder."""

    def call(*argv: str, **options: Any) -> Outcome:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **options.pop("env", {})}
        done = subprocess.run(
            [sys.executable, *argv],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=250,
            **options,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny model with a tokenizer into a new folder: ``save_model(model, config)``."""

    def save(model: Any, config: dict[str, Any], name: str = "tiny") -> Path:
        from mlx_lm.utils import save_model as save_weights

        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_weights(folder, model)
        save_tokenizer(folder, config["vocab_size"])
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_model_dir(save_model: Callable[..., Path], tiny_llama: Callable[..., Any]) -> Path:
    model = tiny_llama(seed=3)
    return save_model(model, settings_of(model.args))


@pytest.fixture(scope="session")
def hybrid_model_dir(save_model: Callable[..., Path]) -> Path:
    """A model with recurrent layers."""
    import models

    return save_model(models.make("qwen3_next"), {"model_type": "qwen3_next"} | models.CONFIGS["qwen3_next"])


@pytest.fixture(scope="session")
def known_settings() -> Callable[[Any], dict[str, Any]]:
    """``known_settings(model.args)``: for ``save_model``."""
    return settings_of


def settings_of(args: Any) -> dict[str, Any]:
    """What a model was made of, as its config.json says it; transformers takes no null there."""
    return {name: value for name, value in dataclasses.asdict(args).items() if value is not None}


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of whole words, with as many as the model knows tokens; what it doesn't know is ``<unk>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>", "<u>", "<a>"]
    words = [*special, *dict.fromkeys(WORDS)]
    words += [f"w{number}" for number in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="session")
def wide_model_dir(save_model: Any, tiny_llama: Any, known_settings: Any) -> Path:
    """Its head dimension is large enough for mlx-lm's quantized cache."""
    model = tiny_llama(seed=4, hidden_size=128)
    return Path(save_model(model, known_settings(model.args), "wide"))
