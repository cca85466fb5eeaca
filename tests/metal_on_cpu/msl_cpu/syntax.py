"""What clang says about a kernel when address spaces are real: the shim that runs kernels has none.

The shim accepts a threadgroup pointer where a device pointer is wanted; this doesn't. This accepts an implicit
conversion to bfloat; the shim doesn't. So both are asked.
"""

from __future__ import annotations

import re
from pathlib import Path

from .translate import with_threadgroup_variables

_ARGUMENTS = [
    "-xc++", "-std=c++14", "-nostdinc", "-Wall", "-Wextra", "-Wconversion", "-Wdouble-promotion", "-Wc++17-extensions",
    "-Wno-sign-conversion", "-Wno-sign-compare", "-Wno-unused", "-Wno-unused-parameter", "-Wno-unknown-attributes", "-Wno-ignored-attributes",
    "-Wno-undefined-inline", "-Wno-implicit-int-float-conversion", "-Wno-undefined-internal",
    "-Xclang", "-cl-single-precision-constant",
]  # fmt: skip


def problems(source: str) -> list[str]:
    """Errors and warnings in the kernel that mlx generated, by line."""
    from clang.cindex import Index

    text = re.sub(r"(?m)^template\s*\[\[host_name\(.*?\)\]\]\s*\[\[kernel\]\]\s*(.*)$", r"template \1", source)
    text = with_threadgroup_variables(text.replace("[[kernel]]", ""))
    header = (Path(__file__).parent / "syntax.h").read_text(encoding="utf-8")
    unit = Index.create().parse(
        "kernel.cpp", args=_ARGUMENTS, unsaved_files=[("kernel.cpp", f'#include "syntax.h"\n#line 1 "kernel.metal"\n{text}'), ("./syntax.h", header)],
    )  # fmt: skip
    return [str(diagnostic) for diagnostic in unit.diagnostics if diagnostic.severity >= diagnostic.Warning]
