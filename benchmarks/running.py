"""How every script here is run: its arguments, tiny sizes for a test that it still works, and its figures as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring, with the options that all scripts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that the script works, nothing else")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, **tiny: Any) -> argparse.Namespace:
    """The arguments; with ``--smoke``, options that are not given have the values ``tiny``."""
    if parser.parse_known_args(argv)[0].smoke:
        parser.set_defaults(**tiny)
    return parser.parse_args(argv)


def model_folder(arguments: argparse.Namespace, **options: Any) -> str:
    """The folder given by ``--model``; without it the demo model SmolLM2-135M is fetched."""
    if arguments.model is not None:
        return str(arguments.model)
    from tinykv_plugin.demo.fetch import fetch_model

    return str(fetch_model(**options))


def save(arguments: argparse.Namespace, figures: Any) -> None:
    """Write the figures where ``--json`` says."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
