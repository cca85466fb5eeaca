"""The model that a request names: another one, one that can't be had, or none at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from served import Server, post, words

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


def test_a_model_that_cant_be_had_disturbs_nobody(
    serve: Serve, together: Together, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """It is looked for before the loaded model is given up, and no request waits for that."""
    broken = {
        "unknown": {"model_type": "no_such_architecture"},
        "foreign": {"model_type": "llama", "model_file": "model.py"},
        "bare": {"model_type": "llama"},
        "odd": {"hidden_size": 3},
    }
    for name, config in broken.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = {
        "unknown": "Model type no_such_architecture not supported.",
        "foreign": "it brings code of its own (model.py), and the server runs without --trust-remote-code",
        "bare": f"there is no model*.safetensors in {tmp_path / 'bare'}",
        "odd": "its config.json has no 'model_type'",
        "absent": "there is no such folder, and it can't be fetched: ",
    }
    server = serve()
    prompt = words(40, 2)
    expected = server.complete(prompt, max_tokens=60)
    stored = server.stats()["stored_prompts"]

    def ask(name: str | None) -> Any:
        if name is None:
            return server.complete(prompt, max_tokens=60)
        return server.client.completions.create(model=str(tmp_path / name), prompt="w1", max_tokens=1)

    answers = dict(zip([None, *said], together(ask, [None, *said]), strict=True))
    assert answers.pop(None) == expected
    for name, error in answers.items():
        assert isinstance(error, openai.NotFoundError), (name, error)
        assert error.body["code"] == "model_not_found"
        assert error.body["message"].startswith(f"the model '{tmp_path / name}' can't be had: {said[name]}")
    adapted = {"prompt": "w1", "model": str(model_dir("llama", seed=4)), "adapters": str(tmp_path / "bare")}
    status, answer = post(server, adapted)
    assert (status, answer["error"]["message"]) == (
        404,
        f"the adapter '{tmp_path / 'bare'}' can't be had: there is no adapter_config.json in it",
    )
    _, answer = post(server, {"prompt": "w1", "draft_model": 5})
    assert answer["error"]["message"] == "draft_model: it has to be a name, not 5"
    stats = server.stats()
    assert (stats["stored_prompts"], stats["requests"]["refused"]) == (stored, len(said) + 2)


def test_the_model_of_the_start_is_known_by_other_paths_too(serve: Serve, model_dir: Callable[..., Path]) -> None:
    """Such as the one that /v1/models tells: it is not loaded again for it."""
    server = serve()
    expected, provider = server.complete(words(9)), server.generator.model_provider
    model, folder = provider.model, model_dir("llama")
    (link := folder.parent / "link").symlink_to(folder)
    for name in (str(link), f"{folder.parent}/./{folder.name}", str(folder.resolve())):
        assert server.client.completions.create(model=name, prompt=words(9), max_tokens=24).choices[0].text == expected
    assert provider.model is model


def test_without_a_model_a_request_has_to_name_one(serve: Serve, model_dir: Callable[..., Path]) -> None:
    server = serve()
    provider = server.generator.model_provider
    provider.cli_args.model = provider._model_map["default_model"] = None
    with pytest.raises(openai.NotFoundError, match="started without --model, so a request has to name one"):
        server.complete("w1")
    assert server.client.completions.create(model=str(model_dir("llama")), prompt="w1", max_tokens=1)


def test_a_divided_model_takes_no_adapters(serve: Serve, model_dir: Callable[..., Path]) -> None:
    server = serve()
    expected = server.complete(words(9))
    server.generator.model_provider.is_distributed = True
    status, answer = post(server, {"prompt": "w1", "model": str(model_dir("llama", seed=4)), "adapters": "/any"})
    assert status == 400
    assert answer["error"]["message"] == "adapters and draft models can't be used with a model that is divided"
    server.generator.model_provider.is_distributed = False
    assert server.complete(words(9)) == expected


def test_without_a_model_requests_say_why(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(folder=tmp_path / "absent")
    (line,) = [line for line in caplog.messages if "could not be loaded, requests that need it will fail: " in line]
    assert "absent" in line
    assert "\n" not in line
    with pytest.raises(Exception, match="503"):
        server.get("/health")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="absent"):
            server.complete("w1")


def test_a_model_whose_weights_cant_be_loaded(serve: Serve, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """It takes the place of the loaded one before that is found out; whoever comes next has that one loaded again."""
    broken = tmp_path / "broken"
    shutil.copytree(model_dir("llama"), broken)
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}), encoding="utf-8")
    server = serve()
    expected = server.complete(words(9))
    with pytest.raises(openai.InternalServerError, match="Missing"):
        server.client.completions.create(model=str(broken), prompt=words(9), max_tokens=24)
    assert server.complete(words(9)) == expected
    assert json.loads(server.get("/health")) == {"status": "ok"}
