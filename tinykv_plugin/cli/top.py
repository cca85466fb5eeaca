"""``tinykv top``: the live view of a server in the terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from .console import console
from .failures import CommandError
from .parser import command_parser
from .picture import draw

DEFAULT_URL = "http://127.0.0.1:8080"
# A server that is silent has nothing new; one that is gone closes the connection.
TIMEOUT = 30.0
RETRY_SECONDS = 2.0


def top(argv: Sequence[str]) -> int:
    """Show the server's pages and requests until interrupted."""
    parser = command_parser(
        "top",
        "Show what a tinykv server is doing: pages, memory, requests. The page /kv of the server shows the "
        "same in a browser.",
        kv_flags=False,
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's address (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print one picture and end; so does output to no terminal")
    options = parser.parse_args(argv)
    out = console()
    if options.once or not out.is_terminal:
        with contextlib.closing(pictures(options.url)) as found:
            first = next(found, None)
        if first is None:
            raise CommandError(f"--url {options.url}: the server has stopped")
        out.print(draw(first, out.width))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        last: Any = Text("")
        for picture in lasting(options.url):
            if isinstance(picture, str):
                live.update(Group(Text(picture), last), refresh=True)
                continue
            last = draw(picture, out.width)
            live.update(last, refresh=True)
    return 0


def lasting(url: str) -> Iterator[dict[str, Any] | str]:
    """Pictures, from connection after connection; where one ends, words that say so. Raises only at the start."""
    begun = False
    while True:
        try:
            for picture in pictures(url):
                begun = True
                yield picture
            trouble = "the server has stopped"
        except CommandError as error:
            if not begun:
                raise
            trouble = str(error)
        yield f"{trouble}; trying again, Ctrl-C ends"
        time.sleep(RETRY_SECONDS)


def pictures(url: str) -> Generator[dict[str, Any]]:
    """What the server at ``url`` sends, as it comes. Raises CommandError if there is none, or none of ours."""
    address = f"{url.rstrip('/')}/kv/events"
    try:
        request = urllib.request.Request(address, headers={"Accept": "text/event-stream"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            if response.headers.get_content_type() != "text/event-stream":
                raise CommandError(f"--url {url}: what answers there is no tinykv server")
            for line in _lines(response):
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
    except urllib.error.HTTPError as error:
        with error:
            reason = _reason(error)
        raise CommandError(f"--url {url}: {reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error))
        raise CommandError(
            f"--url {url}: no server answers there ({reason}); start one with tinykv server, or give its address, "
            f"such as {DEFAULT_URL}"
        ) from None


def _lines(response: Any) -> Iterator[bytes]:
    """Lines of a stream that may be silent for long."""
    while True:
        try:
            line: bytes = response.readline()
        except TimeoutError:
            raise CommandError("the server has sent nothing for a while") from None
        if not line:
            return
        yield line.rstrip(b"\n")


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return "the server there has no live view; it has to be started as tinykv server"
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
