"""What Metal's compiler would say about a kernel, as far as clang and a look at its tree can tell.

clang reads the text with real address spaces: the shim that runs kernels has none, and accepts a threadgroup pointer
where a device pointer is wanted. This accepts an implicit conversion to bfloat; the shim doesn't. So both are asked.
What C++ allows and Metal doesn't is looked for in the tree: see PROBLEMS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .translate import with_threadgroup_variables

_WARNINGS = "all extra conversion double-promotion c++17-extensions"
_FINE = (
    "sign-conversion sign-compare unused unused-parameter unknown-attributes ignored-attributes undefined-inline "
    "undefined-internal implicit-int-float-conversion"
)
_ARGUMENTS = [
    *("-xc++", "-std=c++14", "-nostdinc", "-Xclang", "-cl-single-precision-constant"),
    *(f"-W{name}" for name in _WARNINGS.split()),
    *(f"-Wno-{name}" for name in _FINE.split()),
]
_MOST_BUFFERS = 31

PROBLEMS = {
    "space": "a pointer or reference without an address space",
    "global": "a variable of the program that is not constant",
    "static": "a static variable of a function",
    "recursion": "a function that calls itself",
    "buffers": f"more than {_MOST_BUFFERS} buffers",
    "spilled": "an array of a thread indexed by a loop that isn't unrolled: it can't be in registers",
}


def problems(source: str) -> list[str]:
    """Errors, warnings and what Metal doesn't have in the kernel that mlx generated, by line."""
    from clang.cindex import Index

    buffers = len(re.findall(r"\[\[buffer\(\d+\)\]\]", source))
    text = re.sub(r"(?m)^template\s*\[\[host_name\(.*?\)\]\]\s*\[\[kernel\]\]\s*(.*)$", r"template \1", source)
    text = with_threadgroup_variables(text.replace("[[kernel]]", ""))
    header = (Path(__file__).parent / "syntax.h").read_text(encoding="utf-8")
    text = f'#include "syntax.h"\n#line 1 "kernel.metal"\n{text}'
    unit = Index.create().parse(
        "kernel.cpp", args=_ARGUMENTS, unsaved_files=[("kernel.cpp", text), ("./syntax.h", header)]
    )
    found = [str(diagnostic) for diagnostic in unit.diagnostics if diagnostic.severity >= diagnostic.Warning]
    if buffers > _MOST_BUFFERS:
        found.append(f"{PROBLEMS['buffers']}: {buffers}")
    for cursor in unit.cursor.get_children():
        if cursor.location.file is not None and cursor.location.file.name == "kernel.cpp":
            found += (
                f"kernel.cpp:{place.extent.start.line}: {PROBLEMS[kind]}" for kind, place in _in_tree(cursor, text, ())
            )
    return found


def _in_tree(cursor: Any, text: str, inside: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """What is wrong with ``cursor`` and those in it; ``inside`` has the functions around it."""
    kind = cursor.kind.name
    function = kind in ("FUNCTION_DECL", "FUNCTION_TEMPLATE", "CXX_METHOD")
    if not _has_space(cursor, kind, function, text):
        yield "space", cursor
    if kind == "VAR_DECL":
        if not inside and not re.search(r"\bconstant\b|address_space\(2\)", cursor.type.spelling):
            yield "global", cursor
        elif inside and cursor.storage_class.name == "STATIC":
            yield "static", cursor
    if kind == "CALL_EXPR" and any(name == _called(cursor) for name in inside):
        yield "recursion", cursor
    if kind == "FOR_STMT" and not text[: _offset(cursor, text)].rstrip().endswith("UNROLL"):
        yield from _spilled(cursor)
    if function:
        inside = (*inside, cursor.spelling)
    for child in cursor.get_children():
        yield from _in_tree(child, text, inside)


def _has_space(cursor: Any, kind: str, function: bool, text: str) -> bool:
    """Whether the type that is written here says where it points to, if it is one that points."""
    if function:
        pointed = cursor.result_type
    elif kind in ("PARM_DECL", "VAR_DECL", "FIELD_DECL") or kind.endswith("CAST_EXPR"):
        pointed = cursor.type
    else:
        return True
    if pointed.kind.name not in ("POINTER", "LVALUEREFERENCE"):
        return True
    # `thread` is nothing here: it must be looked for in the text, where it may come before what clang sees.
    words = _words(cursor)
    return (
        re.search(r"\b(device|constant|threadgroup|address_space)\b", pointed.spelling) is not None
        or "thread" in words
        or re.search(r"\bthread\s*$", text[: _offset(cursor, text)]) is not None
        or "threadgroup_variable" in words  # of translate.py's making
    )


def _spilled(loop: Any) -> Iterator[tuple[str, Any]]:
    """Elements of a thread's arrays that ``loop`` chooses with its variable."""
    variable = next((child.spelling for child in loop.walk_preorder() if child.kind.name == "VAR_DECL"), None)
    for cursor in loop.walk_preorder():
        if cursor.kind.name != "ARRAY_SUBSCRIPT_EXPR":
            continue
        array, index = cursor.get_children()
        declared = next((child.referenced for child in array.walk_preorder() if child.referenced is not None), None)
        if declared is None or declared.kind.name != "VAR_DECL" or "ARRAY" not in declared.type.kind.name:
            continue
        if variable in _words(index):
            yield "spilled", cursor


def _called(cursor: Any) -> str:
    """The name of the function that is called, also where a template leaves open which one that is."""
    words = _words(cursor)
    name = re.search(r"(\w+)(<.*>)?$", "".join(words[: words.index("(")] if "(" in words else words))
    return str(cursor.spelling) or (name.group(1) if name else "")


def _words(cursor: Any) -> list[str]:
    return [token.spelling for token in cursor.get_tokens()]


def _offset(cursor: Any, text: str) -> int:
    """Where in ``text``, which may have characters of several bytes, a cursor begins."""
    return len(text.encode()[: cursor.extent.start.offset].decode(errors="ignore"))
