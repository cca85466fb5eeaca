"""From the text of a Metal kernel to C++ that the shim's headers give a meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. ``attribute`` is empty for a buffer."""

    name: str
    reference: bool
    attribute: str


def blanked(source: str) -> str:
    """The source with comments, strings and preprocessor lines blanked, of the same length."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    source = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", blank, source, flags=re.DOTALL)
    return re.sub(r"(?m)^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", blank, source)


def parameters(source: str, kernel: str) -> list[Parameter]:
    """The parameters of ``kernel``, in order."""
    text = blanked(source)
    found = re.search(rf"\bvoid\s+{kernel}\s*\(", text)
    assert found, f"there is no kernel {kernel}"
    depth, end = 1, found.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    parts, level, part = [], 0, ""
    for letter in text[found.end() : end - 1] + ",":
        level += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(letter, 0)
        if letter == "," and level == 0:
            parts.append(" ".join(part.split()))
            part = ""
        else:
            part += letter
    made = []
    for declared in parts:
        attribute = re.search(r"\[\[(.*)\]\]", declared)
        kind = attribute.group(1) if attribute else ""
        name = re.search(r"(\w+)$", declared.split("[[")[0].strip())
        assert name, declared
        made.append(Parameter(name.group(1), "&" in declared, "" if kind.startswith("buffer") else kind))
    return made


def with_threadgroup_variables(source: str) -> str:
    """``threadgroup T name[n];`` becomes a reference into the runtime's threadgroup memory; lines stay in place."""
    text, pieces, done = blanked(source), [], 0
    for number, match in enumerate(
        re.finditer(r"(?<=[;{}])(\s*)\bthreadgroup\s+([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\];]*\]\s*)*);", text)
    ):
        space, kind, name, dims = match.groups()
        pieces += [source[done : match.start()], f"{space}auto& {name} = msl::threadgroup_variable<"]
        pieces += [f'{kind} {dims}>({number}, "{name}");']
        done = match.end()
    return "".join(pieces) + source[done:]


def flattened(path: Path, folders: list[Path], seen: set[Path] | None = None) -> str:
    """A header with its quoted includes put in, each once; those of the shim come before ``folders``."""
    seen = set() if seen is None else seen
    lines = [f'#line 1 "{path}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        quoted = re.match(r'\s*#include\s+"([^"]+)"', line)
        if quoted is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        found = next(file for folder in folders if (file := folder / quoted.group(1)).exists())
        if found not in seen:
            seen.add(found)
            lines += [flattened(found, folders, seen), f'#line {number + 1} "{path}"']
    return "\n".join(lines)


def function_constants(source: str) -> dict[str, str]:
    """Name and type of the constants that are set when a pipeline is made."""
    found = re.finditer(r"constant\s+(\w+)\s+(\w+)\s*\[\[function_constant\(\d+\)\]\]", source)
    return {match.group(2): match.group(1) for match in found}


def as_cpp(source: str, kernel: str, arguments: str) -> str:
    """A translation unit with the kernel and a function that calls it, with template ``arguments`` if it has any."""
    body = re.sub(r"(?m)^template\s*\[\[host_name.*?;\s*$", "", source)
    body = re.sub(r"\[\[\s*kernel\s*\]\]", "", body)
    body = with_threadgroup_variables(body)
    constants = function_constants(source)
    values, buffers = [], 0
    for parameter in parameters(source, kernel):
        if parameter.attribute and not parameter.attribute.startswith("function_constant"):
            values.append(f"msl::attribute_{parameter.attribute}()")
        else:
            kind = "Reference" if parameter.reference else "Pointer"
            values.append(f"msl::{kind}{{arguments[{buffers}]}}")
            buffers += 1
    call = f"{kernel}<{arguments}>" if arguments else kernel
    setters = "".join(f' if (!strcmp(name, "{name}")) memcpy(&{name}, value, sizeof {name});' for name in constants)
    return (
        f'#line 1 "{kernel}.metal"\n{body}\n'
        f'extern "C" void msl_entry(void** arguments) {{ (void)arguments; {call}({", ".join(values)}); }}\n'
        f'extern "C" void msl_constant(const char* name, const void* value) {{ (void)name, (void)value;{setters} }}\n'
    )
