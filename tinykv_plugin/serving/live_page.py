"""live_page(): the page at ``/kv``, one file that loads nothing but the server's own events."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Page:
    """A page and the headers that go with it."""

    body: bytes
    headers: dict[str, str]


@functools.cache
def live_page() -> Page:
    """The page. Its policy lets a browser run its own script and nothing else, and fetch from this server only."""
    text = files(__package__).joinpath("live.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_source(text, 'script')}; style-src {_source(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text.encode(), headers)


def _source(text: str, tag: str) -> str:
    """The hash by which a policy names what is inside the only ``tag``."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
