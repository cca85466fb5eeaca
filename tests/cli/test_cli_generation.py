"""Commands of mlx-lm give the same output with paged caches as without the plugin."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TEXT = "the a page of keys and values holds tokens in slots while one table maps them to memory so that"

Call = Callable[..., Any]


@pytest.fixture
def stock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``stock("generate", …)``: what mlx-lm's command prints without the plugin."""

    def call(command: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"mlx_lm.{command}", *argv])
        capsys.readouterr()
        importlib.import_module(f"mlx_lm.{command}").main()
        return str(capsys.readouterr().out)

    return call


@pytest.fixture(scope="session")
def draft_model_dir(save_model: Call, tiny_llama: Call, known_settings: Call) -> Path:
    # Near the target, so that some drafts are accepted and some are not.
    import mlx.core as mx

    model = tiny_llama(seed=3)
    mx.random.seed(5)
    model.apply(lambda weight: weight + 0.03 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight)
    return Path(save_model(model, known_settings(model.args), "draft"))


def text_of(output: str) -> str:
    """The generated text, between the two rules that ``generate`` prints around it."""
    return output.split("=" * 10)[1]


def without_figures(output: str) -> list[str]:
    """Lines with nothing in them that differs from run to run."""
    figures = ("tok/s", "tokens-per-sec", "emory")
    return [line for line in output.splitlines() if not any(figure in line for figure in figures)]


def generate_arguments(model: Path, tokens: int = 40) -> list[str]:
    return ["--model", str(model), "--prompt", TEXT * 2, "--max-tokens", str(tokens)]


@pytest.mark.parametrize("page_size", ["1", "8", "32", "128"])
def test_generate(tinykv: Call, stock: Call, tiny_model_dir: Path, page_size: str) -> None:
    argv = generate_arguments(tiny_model_dir)
    plain = stock("generate", *argv)
    paged = tinykv("generate", *argv, "--kv-page-size", page_size, "--kv-stats")
    assert paged.code == 0
    assert without_figures(paged.out) == without_figures(plain)
    assert "KV pages of tiny" in paged.err
    assert "4 full (" in paged.err


def test_generate_in_prefill_chunks(tinykv: Call, stock: Call, tiny_model_dir: Path) -> None:
    argv = [*generate_arguments(tiny_model_dir), "--prefill-step-size", "7"]
    assert text_of(tinykv("generate", *argv, "--kv-page-size=4").out) == text_of(stock("generate", *argv))


def test_generate_without_statistics_says_nothing_more(tinykv: Call, tiny_model_dir: Path) -> None:
    assert tinykv("generate", *generate_arguments(tiny_model_dir, 4)).err == ""


def test_generate_with_a_draft_model(tinykv: Call, stock: Call, tiny_model_dir: Path, draft_model_dir: Path) -> None:
    argv = [*generate_arguments(tiny_model_dir), "--draft-model", str(draft_model_dir)]
    paged = tinykv("generate", *argv, "--kv-page-size", "4", "--kv-stats")
    assert paged.code == 0
    assert text_of(paged.out) == text_of(stock("generate", *argv))
    assert "KV pages of tiny" in paged.err
    assert "KV pages of draft" in paged.err


@pytest.mark.parametrize("prefill", ["2048", "16"])
def test_generate_with_a_bounded_cache(tinykv: Call, stock: Call, tiny_model_dir: Path, prefill: str) -> None:
    """mlx-lm gives a llama no bounded cache whatever the flag says; ours is like the one it has for other models."""
    from mlx_lm import load
    from mlx_lm.generate import stream_generate
    from mlx_lm.models.cache import RotatingKVCache

    model, tokenizer = load(str(tiny_model_dir))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": f"{TEXT} keys"}], add_generation_prompt=True)
    bounded = [RotatingKVCache(max_size=16, keep=4) for _ in model.layers]
    responses = stream_generate(
        model, tokenizer, prompt, max_tokens=40, prompt_cache=bounded, prefill_step_size=int(prefill)
    )
    expected = "".join(response.text for response in responses)
    argv = ["--model", str(tiny_model_dir), "--prompt", f"{TEXT} keys", "-m", "40", "--prefill-step-size", prefill]
    plain = text_of(stock("generate", *argv)).strip()
    assert plain != expected
    for flag in ("--max-kv-size", "--kv-max-kv-size"):
        assert text_of(tinykv("generate", *argv, flag, "16", "--kv-page-size=4").out).strip() == expected
    assert text_of(tinykv("generate", *argv, "--max-kv-size=16", "--kv-cache=dense").out).strip() == plain


def test_generate_with_mlx_lms_quantized_cache(tinykv: Call, stock: Call, wide_model_dir: Path) -> None:
    argv = [*generate_arguments(wide_model_dir), "--kv-bits=4", "--kv-group-size=32", "--quantized-kv-start=0"]
    plain = text_of(stock("generate", *argv))
    assert plain != text_of(stock("generate", *generate_arguments(wide_model_dir)))
    assert text_of(tinykv("generate", *argv, "--kv-cache", "dense").out) == plain


def test_generate_with_quantized_pages(tinykv: Call, stock: Call, wide_model_dir: Path, tmp_path: Path) -> None:
    from mlx_lm import load
    from mlx_lm.generate import stream_generate

    from tinykv_plugin.attachment import attach

    argv = generate_arguments(wide_model_dir)
    model, tokenizer = load(str(wide_model_dir))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": TEXT * 2}], add_generation_prompt=True)
    with attach(model, bits=4, group_size=32, page_size=4):
        expected = "".join(one.text for one in stream_generate(model, tokenizer, prompt, max_tokens=24))
    flags = ["--kv-bits", "4", "--kv-group-size=32", "--kv-page-size", "4"]
    done = tinykv("generate", *argv, "-m", "24", *flags, "--kv-stats")
    assert text_of(done.out).strip() == expected.strip()
    assert "4 bits in groups of 32" in done.err
    assert text_of(stock("generate", *argv, "-m", "24")).strip() != expected.strip()
    # A file of quantized pages, made and used with the same flags.
    file = str(tmp_path / "cache.safetensors")
    saving = ["--model", str(wide_model_dir), "--prompt", TEXT, "--prompt-cache-file", file]
    flags[1] = "8"
    assert tinykv("cache_prompt", *saving, *flags, "--quantized-kv-start", "0").code == 0
    asking = ["--prompt-cache-file", file, "--prompt", "keys", "-m", "8"]
    assert text_of(tinykv("generate", *asking, *flags).out) == text_of(stock("generate", *asking, "--kv-group-size=32"))
    refused = tinykv("generate", *asking, "--kv-bits", "4", "--kv-group-size=32")
    assert refused.code == 1
    assert "layer 0 holds 8 bits in groups of 32, its pages hold 4 bits in groups of 32" in refused.err


def test_generate_with_full_precision_at_first(tinykv: Call, stock: Call, wide_model_dir: Path) -> None:
    """Before --quantized-kv-start, mlx-lm's or ours, nothing is rounded."""
    argv = [*generate_arguments(wide_model_dir), "-m", "24"]
    exact = text_of(stock("generate", *argv)).strip()
    flags = ["--kv-bits", "4", "--kv-group-size=32", "--kv-page-size", "4"]
    assert text_of(tinykv("generate", *argv, *flags).out).strip() != exact
    for flag in ("--quantized-kv-start", "--kv-quantized-start"):
        assert text_of(tinykv("generate", *argv, *flags, flag, "5000").out).strip() == exact


def test_out_of_pages_is_one_line_after_the_statistics(tinykv: Call, tiny_model_dir: Path) -> None:
    argv = generate_arguments(tiny_model_dir)
    done = tinykv("generate", *argv, "--kv-max-pages", "2", "--kv-page-size", "8", "--kv-stats")
    assert done.code == 1
    *_, last = done.err.splitlines()
    assert last.startswith("tinykv: error: out of KV pages: ")
    assert "Traceback" not in done.err


def test_a_saved_prompt_is_used(tinykv: Call, stock: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Files of either are read by both, and the generation goes on alike."""

    def save(run: Call, name: str) -> str:
        file = str(tmp_path / name)
        run("cache_prompt", "--model", str(tiny_model_dir), "--prompt", TEXT, "--prompt-cache-file", file)
        return file

    def go_on(run: Call, file: str) -> str:
        done = run("generate", "--prompt-cache-file", file, "--prompt", "keys of memory", "--max-tokens", "24")
        return text_of(done if isinstance(done, str) else done.out)

    ours = save(tinykv, "ours.safetensors")
    theirs = save(stock, "theirs.safetensors")
    expected = go_on(stock, theirs)
    assert go_on(stock, ours) == expected
    assert go_on(tinykv, ours) == expected
    assert go_on(tinykv, theirs) == expected
    without = stock("generate", "--model", str(tiny_model_dir), "--prompt", "keys of memory", "--max-tokens", "24")
    assert text_of(without) != expected


def test_a_saved_prompt_is_in_pages_again(tinykv: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "prompt.safetensors")
    tinykv("cache_prompt", "--model", str(tiny_model_dir), "--prompt", TEXT, "--prompt-cache-file", file)
    done = tinykv("generate", "--prompt-cache-file", file, "-m", "2", "--kv-stats", "--kv-page-size", "4")
    assert done.code == 0
    tokens = len(TEXT.split())
    peak = int(done.err.split("(peak ")[1].split(")")[0])
    assert peak > tokens // 4


def test_a_file_that_is_no_prompt_cache_is_one_line(tinykv: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    file.write_text("nonsense")
    done = tinykv("generate", "--model", str(tiny_model_dir), "--prompt-cache-file", str(file))
    assert done.code == 1
    assert done.err.startswith("tinykv: error: ")
    assert done.err.count("\n") == 1
    assert str(file) in done.err


def test_a_file_of_another_model_is_one_line(
    tinykv: Call,
    stock: Call,
    tiny_model_dir: Path,
    save_model: Call,
    tiny_llama: Call,
    known_settings: Call,
    tmp_path: Path,
) -> None:
    other = tiny_llama(seed=3, num_hidden_layers=2)
    folder = save_model(other, known_settings(other.args), "short")
    file = str(tmp_path / "prompt.safetensors")
    stock("cache_prompt", "--model", str(folder), "--prompt", TEXT, "--prompt-cache-file", file)
    # The file names the folder of its model, where another model is now.
    for path in tiny_model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    done = tinykv("generate", "--prompt-cache-file", file)
    assert done.code == 1
    assert done.err.startswith("tinykv: error: ")
    assert done.err.count("\n") == 1


def test_a_program_saves_with_mlx_lms_function(tinykv: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        "import sys\n"
        "import mlx.core as mx\n"
        "from mlx_lm import load\n"
        "from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache\n"
        "model, _ = load(sys.argv[1])\n"
        "cache = make_prompt_cache(model)\n"
        "first = model(mx.array([[5, 6, 7]]), cache=cache)\n"
        "save_prompt_cache(sys.argv[2], cache, {'note': 'x'})\n"
        "loaded, metadata = load_prompt_cache(sys.argv[2], return_metadata=True)\n"
        "save_prompt_cache(sys.argv[2], loaded, metadata)\n"
        "again = model(mx.array([[8]]), cache=loaded)\n"
        "print(metadata, bool(mx.allclose(again, model(mx.array([[8]]), cache=cache), atol=1e-4)))\n"
    )
    done = tinykv("run", str(script), str(tiny_model_dir), str(tmp_path / "x.safetensors"))
    assert done.code == 0
    assert "'tinykv': '{\"version\": 1, " in done.out
    assert done.out.endswith("'note': 'x'} True\n")


def test_chat(tinykv: Call, stock: Call, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--model", str(tiny_model_dir), "--max-tokens", "12"]

    def typed() -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\nkeys and values\nr\nkeys and values\nh\nq\n"))

    typed()
    plain = stock("chat", *argv)
    typed()
    paged = tinykv("chat", *argv, "--kv-page-size", "8", "--kv-stats")
    assert paged.code == 0
    assert without_figures(paged.out) == without_figures(plain)
    assert "KV pages of tiny" in paged.err


@pytest.mark.parametrize("kind", ["tiny_model_dir", "hybrid_model_dir"])
def test_a_chat_that_starts_again_finds_its_prompts(
    tinykv: Call, stock: Call, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    argv = ["--model", str(request.getfixturevalue(kind)), "--max-tokens", "12"]

    def typed() -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\nkeys and values\nr\n{TEXT}\nkeys of pages\nq\n"))

    typed()
    plain = stock("chat", *argv)
    typed()
    paged = tinykv("chat", *argv, "--kv-page-size", "8", "--kv-stats")
    assert without_figures(paged.out) == without_figures(plain)
    # The first prompt again, all but the token that has to be run.
    assert "prefix cache: 21 of 44 prompt tokens" in " ".join(paged.err.replace("│", ":").split()).replace(" :", ":")


@pytest.mark.parametrize(
    ("kind", "draft"), [("tiny_model_dir", False), ("tiny_model_dir", True), ("hybrid_model_dir", False)]
)
def test_generate_finds_its_prompt_on_disk(
    tinykv: Call,
    stock: Call,
    request: pytest.FixtureRequest,
    draft_model_dir: Path,
    tmp_path: Path,
    kind: str,
    draft: bool,
) -> None:
    """The second run computes what is new."""
    argv = generate_arguments(request.getfixturevalue(kind))
    argv += ["--draft-model", str(draft_model_dir)] if draft else []
    plain = stock("generate", *argv)
    found = []
    for _ in range(2):
        paged = tinykv("generate", *argv, "--kv-page-size", "8", "--kv-stats", "--kv-prefix-dir", str(tmp_path))
        assert (paged.code, without_figures(paged.out)) == (0, without_figures(plain))
        found += [line for line in paged.err.splitlines() if "prompt tokens were stored" in line]
    assert len(found) == (4 if draft else 2)
    assert " 0 of 41 " in found[0]
    assert " 40 of 41 " in found[-1]


@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_benchmark(tinykv: Call, tiny_model_dir: Path, batch_size: str) -> None:
    argv = ["--model", str(tiny_model_dir), "-p", "16", "-g", "4", "-n", "1", "-b", batch_size]
    done = tinykv("benchmark", *argv, "--kv-stats")
    assert done.code == 0
    assert "Averages: prompt_tps=" in done.out
    assert "KV pages of tiny" in done.err


def test_a_pass_without_a_cache(tinykv: Call, stock: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Commands that are forwarded as they are still run."""
    target = tmp_path / "converted"
    assert tinykv("convert", "--hf-path", str(tiny_model_dir), "--mlx-path", str(target)).code == 0
    argv = generate_arguments(target, 8)
    assert text_of(tinykv("generate", *argv).out) == text_of(stock("generate", *argv))


class Server:
    """A server process, asked over HTTP."""

    def __init__(self, command: list[str], folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        start = (
            "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
            "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
        )
        self.log = folder / f"{command[0]}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *command, "--port", self.url.rsplit(":", 1)[1]],
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def wait(self) -> None:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def complete(self, prompt: str, **fields: Any) -> str:
        body = json.dumps({"model": "default_model", "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields})
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["text"])

    def stop(self) -> str:
        """Ctrl-C; returns everything it wrote."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
        return self.log.read_text()


@pytest.fixture
def servers(tiny_model_dir: Path, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """The stock server and ours."""
    argv = ["server", "--model", str(tiny_model_dir)]
    both = (
        Server(["mlx_lm", *argv], tmp_path),
        Server(["tinykv_plugin", *argv, "--kv-page-size", "8", "--kv-stats"], tmp_path),
    )
    try:
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.process.kill()
            server.process.wait()


def test_server(servers: tuple[Server, Server], tiny_model_dir: Path, draft_model_dir: Path) -> None:
    stock, ours = servers
    prompts = [TEXT, TEXT, f"{TEXT} {TEXT}", "keys and values", "so that"]
    expected = [stock.complete(prompt) for prompt in prompts]
    assert [ours.complete(prompt) for prompt in prompts] == expected
    with ThreadPoolExecutor(len(prompts)) as clients:
        assert list(clients.map(ours.complete, prompts)) == expected
    # A request may name another model: the first one is let go.
    assert ours.complete(TEXT, model=str(draft_model_dir)) == stock.complete(TEXT, model=str(draft_model_dir))
    written = ours.stop()
    # mlx's own threads sometimes abort a process that ends with the server's, without the plugin too.
    assert ours.process.returncode in (0, -signal.SIGABRT)
    assert "Traceback" not in written, written
    assert "KV pages of tiny" in written
    assert "KV pages of draft" in written
