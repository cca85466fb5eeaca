"""Servers of ours and of stock mlx-lm in this process, and an official client for each."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx_lm.server
import mlx_lm.utils
import models
import openai
from prometheus_client.parser import text_string_to_metric_families

from tinykv_plugin.cli.models import AttachedModels
from tinykv_plugin.cli.patches import replaced
from tinykv_plugin.config import KVCacheConfig
from tinykv_plugin.serving.handler import PagedAPIHandler
from tinykv_plugin.serving.http_server import PagedHTTPServer
from tinykv_plugin.serving.prompt_cache import PagedPromptCache
from tinykv_plugin.serving.response_generator import PagedResponseGenerator

# As it is while no server of ours runs; and the threads of stock's servers, which many tests share.
LOAD_MODEL = mlx_lm.utils.load_model
KEPT_THREADS: set[threading.Thread] = set()

SPECIAL = ["<unk>", "<s>", "</s>", "<u>", "<a>", "<e>"]
# A word is a token, and what a model says comes back as the same tokens when it is sent again.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': '<s>', 'user': '<u>', 'assistant': '<a>'}[message['role']] }} {{ message['content'] }} <e> "
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def words(count: int, seed: int = 0) -> str:
    """A prompt of ``count`` tokens, different for each seed from the first one on."""
    vocabulary = models.VOCABULARY - len(SPECIAL)
    return " ".join(f"w{(5 * i + 7 * seed + i * i * (seed + 1)) % vocabulary}" for i in range(count))


def wait_until(
    condition: Callable[[], object], seconds: float = 20, what: str | Callable[[], str] = "it to happen"
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what() if callable(what) else what}"
        time.sleep(0.005)


@contextmanager
def request(server: Server, prompt: str, **fields: Any) -> Iterator[socket.socket]:
    """A connection over which a completion was asked for; closed at the end, whatever has arrived by then."""
    body = json.dumps({"prompt": prompt, "max_tokens": 3000, **fields}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        yield connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    received = b""
    while wanted not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


def post(server: Server, body: object, path: str = "/v1/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = [*SPECIAL, *(f"w{number}" for number in range(vocab_size - len(SPECIAL)))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


ARGUMENTS: dict[str, Any] = {
    "adapter_path": None,
    "allowed_origins": "*",
    "draft_model": None,
    "num_draft_tokens": 3,
    "trust_remote_code": False,
    "chat_template": "",
    "use_default_chat_template": False,
    "temp": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 24,
    "chat_template_args": {},
    "decode_concurrency": 32,
    "prompt_concurrency": 8,
    "prefill_step_size": 2048,
    "prompt_cache_size": 10,
    "prompt_cache_bytes": None,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": 5000,
    "pipeline": False,
}


@dataclasses.dataclass
class Server:
    """A running server and an official client for it."""

    generator: Any
    port: int
    thread: threading.Thread
    attached: list[Any] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, prompt: str, max_tokens: int = 24, **fields: Any) -> str:
        answer = self.client.completions.create(model="default_model", prompt=prompt, max_tokens=max_tokens, **fields)
        return answer.choices[0].text

    def chat(self, messages: list[Any], max_tokens: int = 24, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model="default_model", messages=messages, max_tokens=max_tokens, **fields
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as response:
            return str(response.read().decode())

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/kv/stats"))
        return found

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no metric {name} {labels}")

    def idle(self) -> bool:
        state = self.generator.state()
        return bool(state.running == state.waiting == 0)


class StockServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def start_paged(arguments: argparse.Namespace, **settings: Any) -> tuple[Server, Callable[[], None]]:
    config = KVCacheConfig(**{"page_size": 4, "memory": "4MiB", **settings})
    attached = AttachedModels(config)
    attached.__enter__()
    generator = PagedResponseGenerator(
        mlx_lm.server.ModelProvider(arguments),
        PagedPromptCache(arguments.prompt_cache_size),
        max_queue=config.max_queue,
    )
    server, stop_http = listen(generator, PagedHTTPServer, PagedAPIHandler)
    wait_until(lambda: server.stats()["model"] is not None or not generator.is_healthy, what="the model")

    server.attached += [held.kv for held in attached._held]

    def stop() -> None:
        try:
            stop_http()
            for held in attached._held:
                held.kv.check()
                stats = held.kv.stats()
                assert (stats.pages_used, stats.sequences) == (0, 0), stats
        finally:
            attached.__exit__(None, None, None)

    return server, stop


def start_stock(arguments: argparse.Namespace) -> tuple[Server, Callable[[], None]]:
    with replaced(mlx_lm.utils, "load_model", LOAD_MODEL):
        provider = mlx_lm.server.ModelProvider(arguments)
        generator = mlx_lm.server.ResponseGenerator(provider, mlx_lm.server.LRUPromptCache(arguments.prompt_cache_size))
        wait_until(lambda: provider.model_key is not None, what="stock's model")
    KEPT_THREADS.add(generator._generation_thread)
    server, stop = listen(generator, StockServer, mlx_lm.server.APIHandler)
    KEPT_THREADS.add(server.thread)
    return server, stop


def listen(generator: Any, server_class: Any, handler_class: Any) -> tuple[Server, Callable[[], None]]:
    httpd = server_class(("127.0.0.1", 0), lambda *args: handler_class(generator, *args, system_fingerprint="test"))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server = Server(generator, httpd.server_address[1], thread)

    def stop() -> None:
        if "client" in vars(server):
            server.client.close()
        httpd.shutdown()
        httpd.server_close()
        thread.join()
        generator.stop_and_join()

    return server, stop
