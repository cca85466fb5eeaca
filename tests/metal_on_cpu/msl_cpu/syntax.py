"""What clang says about a kernel when address spaces are real: the shim that runs kernels has none.

The shim accepts a threadgroup pointer where a device pointer is wanted; this doesn't. This accepts an implicit
conversion to bfloat; the shim doesn't. So both are asked.
"""

from __future__ import annotations

import re
from pathlib import Path

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


def problems(source: str) -> list[str]:
    """Errors and warnings in the kernel that mlx generated, by line."""
    from clang.cindex import Index

    text = re.sub(r"(?m)^template\s*\[\[host_name\(.*?\)\]\]\s*\[\[kernel\]\]\s*(.*)$", r"template \1", source)
    text = with_threadgroup_variables(text.replace("[[kernel]]", ""))
    header = (Path(__file__).parent / "syntax.h").read_text(encoding="utf-8")
    text = f'#include "syntax.h"\n#line 1 "kernel.metal"\n{text}'
    unit = Index.create().parse(
        "kernel.cpp", args=_ARGUMENTS, unsaved_files=[("kernel.cpp", text), ("./syntax.h", header)]
    )
    return [str(diagnostic) for diagnostic in unit.diagnostics if diagnostic.severity >= diagnostic.Warning]
