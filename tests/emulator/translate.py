"""CUDA C++ as hidet generates it, as C++ for the host: see ``emulated.hpp`` for what it is compiled with.

PTX is translated instruction by instruction: ``@p st.global.v4.u32 [%0], {%2, %3, %4, %5};`` becomes
``if (p) ptx::st_global_v4_u32(ptx::at(o0), ptx::group(o2, o3, o4, o5));``. One that the header lacks is an error of the
compiler, which names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_LAUNCH = re.compile(r"(\w+(?:<[\w\s,]*>)?)\s*<<<")
_DYNAMIC = re.compile(
    r"extern\s+(?:__align__\(\d+\)\s*)?__shared__\s+(?:__align__\(\d+\)\s*)?(\w+)\s+(\w+)\s*\[\s*\]\s*;"
)
_REGISTER_TYPES = {"pred": "bool", "b16": "uint16_t", "f32": "float", "f64": "double", "s32": "int32_t"}
_REGISTER_TYPES |= {f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (32, 64)}


def translate(source: str) -> str:
    """The source for the host.

    Raises
    ------
    ValueError
        When inline PTX has a form that is not known.
    """
    source = _replaced_assembly(source)
    source = _replaced_launches(source)
    source = _DYNAMIC.sub(r"\1 *\2 = reinterpret_cast<\1 *>(emulated::dynamic_shared_memory());", source)
    source = re.sub(r"__launch_bounds__\(.*?\)", "", source)
    shared = 'static __attribute__((section("emulated_shared")))'
    source = re.sub(r"\bstatic\s+__shared__\b|\b__shared__\s+static\b|\b__shared__\b", shared, source)
    return f'#include "emulated.hpp"\n{source}'


def _replaced_assembly(source: str) -> str:
    parts, at = [], 0
    while (found := _ASM.search(source, at)) is not None:
        end = _closing(source, found.end() - 1)
        parts += [source[at : found.start()], _assembly(source[found.end() : end])]
        at = source.index(";", end) + 1
    return "".join([*parts, source[at:]])


def _replaced_launches(source: str) -> str:
    parts, at = [], 0
    while (found := _LAUNCH.search(source, at)) is not None:
        middle = source.index(">>>", found.end())
        opened = source.index("(", middle)
        end = _closing(source, opened)
        arguments = ", ".join(filter(None, (source[found.end() : middle], source[opened + 1 : end].strip())))
        parts += [source[at : found.start()], f'emulated::launch("{found[1]}", {found[1]}, {arguments})']
        at = end + 1
    return "".join([*parts, source[at:]])


def _assembly(body: str) -> str:
    """A block for ``asm("text" : outputs : inputs : clobbers)``, given what is between the parentheses."""
    text, *operands = _split(body, ":")
    instructions = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).replace("\\n", " ").replace("\\t", " ")
    lines, count = [], 0
    for section, operand in enumerate(operands[:2]):
        for each in filter(None, map(str.strip, _split(operand, ","))):
            constraint, expression = re.fullmatch(r'"([^"]+)"\s*\((.*)\)', each, re.DOTALL).groups()  # type: ignore[union-attr]
            kind = "&" if section == 0 else ""
            value = expression if section == 0 else f"ptx::in_{constraint}({expression})"
            lines.append(f"auto {kind}o{count} = {value};")
            count += 1
    lines += _instructions(instructions)
    return "{ " + " ".join(lines) + " }"


def _instructions(text: str) -> Iterator[str]:
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    for statement in filter(None, map(str.strip, text.split(";"))):
        register = re.fullmatch(r"\.reg\s*\.(\w+)\s+([\w\s,]+)", statement)
        if register is not None:
            yield f"{_REGISTER_TYPES[register[1]]} {register[2]};"
            continue
        found = re.fullmatch(r"(?:@(!?)(\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
        if found is None:
            raise ValueError(f"cannot read the instruction {statement!r}")
        negated, predicate, opcode, operands = found.groups()
        arguments = ", ".join(_operand(each.strip()) for each in _split(operands, ",") if each.strip())
        name = re.sub(r"[.:]+", "_", opcode)
        condition = f"if ({negated}{predicate}) " if predicate else ""
        yield f"{condition}ptx::{name}({arguments});"


def _operand(text: str) -> str:
    if text.startswith("{"):
        return f"ptx::group({', '.join(_operand(each.strip()) for each in text[1:-1].split(','))})"
    if text.startswith("["):
        return f"ptx::at({_operand(text[1:-1].strip())})"
    return re.sub(r"%(\d+)", r"o\1", text)


def _closing(text: str, opened: int) -> int:
    """The position of the parenthesis that closes the one at ``opened``; strings are skipped."""
    depth, quoted, at = 0, False, opened
    while True:
        c = text[at]
        if c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            if depth == 0:
                return at
        at += 1


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are neither in brackets nor in strings."""
    parts, depth, quoted, at = [""], 0, False, 0
    while at < len(text):
        c = text[at]
        if c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
        if not quoted and depth == 0 and text.startswith("::", at):
            # Two sections with nothing between, or a name's scope.
            if separator == ":" and not (parts[-1].strip() and re.search(r"\w$", parts[-1].strip())):
                parts += ["", ""]
            else:
                parts[-1] += "::"
            at += 2
            continue
        if c == separator and not quoted and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
        at += 1
    return parts
