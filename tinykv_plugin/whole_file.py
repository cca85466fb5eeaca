"""write_whole(): a file that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[str], object]) -> None:
    """Have ``write`` fill a file, whose name it is given, that replaces ``path`` when it is complete.

    Raises what ``write`` raises; ``path`` is then as before. The name has the suffix of ``path``, as mlx appends one to
    a name without.
    """
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
    temporary.open("xb").close()  # with the permissions that a new file has here, whoever writes it
    try:
        write(os.fspath(temporary))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
