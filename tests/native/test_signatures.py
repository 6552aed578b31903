"""The tables of C signatures agree with the headers, in both directions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from hidet_dist import native
from hidet_dist.native import signatures
from hidet_dist.native.interface import PREFIX, Header, Signature
from hidet_dist.native.search import library as solvers
from hidet_dist.native.search import signatures as of_solvers

INCLUDE = Path(__file__).parents[2] / "hidet_dist" / "include" / "hidet_dist"

VALUES = {
    "uint8_t": ctypes.c_uint8,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "double": c_double,
    "int": ctypes.c_int,
}
POINTERS = {"void": c_void_p, "float": c_void_p, "char": c_char_p}  # floats: of tensors, by address
POINTERS |= {name: POINTER(VALUES[name]) for name in ("uint8_t", "int32_t", "int64_t", "double")}
LIBRARIES = {"": signatures.HEADERS, "search/": of_solvers.HEADERS}
"""By the folder of their headers."""
HEADERS = {folder + name: header for folder, headers in LIBRARIES.items() for name, header in headers.items()}
STRUCTURES = {name: kind for header in HEADERS.values() for name, kind in header.structures.items()}
CALLBACKS = {name: kind for header in HEADERS.values() for name, kind in header.callbacks.items()}

FUNCTION = re.compile(rf"HIDET_DIST_API\s+([\w\s*]+?){PREFIX}(\w+)\s*\(([^()]*)\)\s*;")
CALLBACK = re.compile(rf"typedef\s+([\w\s*]+?)\(\s*\*\s*{PREFIX}(\w+)\s*\)\s*\(([^()]*)\)\s*;")
STRUCTURE = re.compile(rf"typedef\s+struct\s+{PREFIX}(\w+)\s*\{{([^{{}}]*)\}}\s*{PREFIX}\1\s*;")
OPAQUE = re.compile(rf"typedef\s+struct\s+{PREFIX}(\w+)\s+{PREFIX}\1\s*;")
ARRAY = re.compile(r"(\w+) (\w+)\[(\d+)\]")
METHOD = re.compile(r"([\w\s*]+?)\(\s*\*\s*(\w+)\s*\)\s*\(([^()]*)\)")
ENUM = re.compile(rf"enum\s+{PREFIX}\w+\s*\{{([^{{}}]*)\}}\s*;")
DEFINE = re.compile(r"^#define\s+HIDET_DIST_(\w+)\s+\(?(-?\d+)\)?\s*$", re.MULTILINE)


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def c_type(text: str, opaque: set[str]) -> Any:
    """The ctypes type of a C type as written, such as ``const void *``."""
    words = [word for word in re.findall(r"\w+|\*", text) if word not in ("const", "struct")]
    base, stars = words[0], words.count("*")
    assert words[1:] == ["*"] * stars, f"not understood: {text!r}"
    name = base.removeprefix(PREFIX)
    if stars == 0:
        return None if base == "void" else CALLBACKS.get(name) or VALUES[base]
    if stars == 2 and base == "void":
        return POINTER(c_void_p)
    assert stars == 1, f"not understood: {text!r}"
    if base == name:
        return POINTERS[base]
    assert name in STRUCTURES or name in opaque, f"{base} is not declared"
    return POINTER(STRUCTURES[name]) if name in STRUCTURES else c_void_p


def signature(result: str, arguments: str, opaque: set[str]) -> Signature:
    each = [argument.strip() for argument in arguments.split(",")]
    types = [] if each in ([""], ["void"]) else [re.sub(r"\b\w+$", "", argument) for argument in each]
    return Signature(c_type(result, opaque), tuple(c_type(text, opaque) for text in types))


def members(body: str, opaque: set[str]) -> Iterator[tuple[str, Any]]:
    """The members of a structure, functions as their signatures."""
    for declaration in filter(None, (each.strip() for each in body.split(";"))):
        method = METHOD.fullmatch(declaration)
        if method:
            result, name, arguments = method.groups()
            yield name, signature(result, arguments, opaque)
            continue
        array = ARRAY.fullmatch(declaration)
        if array:
            kind, name, extent = array.groups()
            yield name, c_type(kind, opaque) * int(extent)
            continue
        first, *others = (each.strip() for each in declaration.split(","))
        kind = re.sub(r"\b\w+$", "", first)
        for name in (first.removeprefix(kind), *others):
            yield name, c_type(kind, opaque)


def declared(text: str, opaque: set[str]) -> dict[str, Any]:
    """All that a header declares, by name."""
    text = without_comments(text)
    functions, callbacks, structures = FUNCTION.findall(text), CALLBACK.findall(text), STRUCTURE.findall(text)
    # Nothing is passed over.
    assert len(functions) == len(re.findall(r"^\s*HIDET_DIST_API\b", text, re.MULTILINE))
    assert len(callbacks) + len(structures) + len(OPAQUE.findall(text)) == len(re.findall(r"\btypedef\b", text))
    enums = ENUM.findall(text)
    assert len(enums) == len(re.findall(r"\benum\b", text))
    constants = [*DEFINE.findall(text), *re.findall(r"HIDET_DIST_(\w+)\s*=\s*(-?\d+)", " ".join(enums))]
    assert sum(body.count("=") for body in enums) == sum(body.count(",") + 1 for body in enums)
    return {
        **{f"function {name}": signature(result, arguments, opaque) for result, name, arguments in functions},
        **{f"callback {name}": signature(result, arguments, opaque) for result, name, arguments in callbacks},
        **{f"structure {name}": tuple(members(body, opaque)) for name, body in structures},
        **{f"constant {name}": int(value) for name, value in constants},
    }


def as_signature(kind: Any) -> Any:
    """The signature of a ctypes function type; any other type as it is."""
    if isinstance(kind, type) and issubclass(kind, ctypes._CFuncPtr):
        return Signature(kind._restype_, tuple(kind._argtypes_))  # type: ignore[attr-defined]
    return kind


def tabled(header: Header) -> dict[str, Any]:
    """The same of a table."""
    return {
        **{f"function {name}": each for name, each in header.functions.items()},
        **{f"callback {name}": as_signature(each) for name, each in header.callbacks.items()},
        **{
            f"structure {name}": tuple((field, as_signature(kind)) for field, kind in each._fields_)  # type: ignore[misc]
            for name, each in header.structures.items()
        },
        **{f"constant {name}": value for name, value in header.constants.items()},
    }


def texts() -> dict[str, str]:
    """The headers that declare functions of the libraries, by path."""
    paths = [path for folder in LIBRARIES for path in (INCLUDE / folder).glob("*.h")]
    each = {path.relative_to(INCLUDE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in each.items() if re.search(rf"HIDET_DIST_API \w+ \*?{PREFIX}", text)}


def opaque_structures() -> set[str]:
    return {name for text in texts().values() for name in OPAQUE.findall(without_comments(text))}


def test_each_header_has_a_table() -> None:
    assert texts().keys() == HEADERS.keys()


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_table_is_what_its_header_declares(name: str) -> None:
    assert declared(texts()[name], opaque_structures()) == tabled(HEADERS[name])


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"int64_t count, int32_t dtype, int32_t group\);", "int32_t count, int32_t dtype, int32_t group);"),
        (r"HIDET_DIST_API int32_t hidet_dist_group_size\(int32_t group\);", ""),
        (r"(HIDET_DIST_API int32_t hidet_dist_group_size)", r"HIDET_DIST_API void hidet_dist_more(void);\n\1"),
        (r"(hidet_dist_bind\()", r"\1int32_t more, "),
        (r"int64_t rows, row, whole;", "int64_t row, rows, whole;"),
        (r"(\(\*copy\)\(void \*context,)", r"\1 int32_t more,"),
        (r"HIDET_DIST_ABI_VERSION \d+", "HIDET_DIST_ABI_VERSION 999"),
        (r"HIDET_DIST_U8 = 7", "HIDET_DIST_U8 = 9"),
    ],
)
def test_a_header_that_differs_is_noticed(pattern: str, by: str) -> None:
    text = texts()["collectives.h"]
    altered, count = re.subn(pattern, by, text, count=1)
    assert count == 1
    agrees = declared(altered, opaque_structures()) == tabled(HEADERS["collectives.h"])
    assert not agrees


@pytest.mark.parametrize(
    ("library", "headers"), [(native.library, signatures.HEADERS), (solvers.library, of_solvers.HEADERS)]
)
def test_libraries_are_loaded_with_these_signatures(
    library: Callable[[], ctypes.CDLL], headers: dict[str, Header]
) -> None:
    for header in headers.values():
        for name, expected in header.functions.items():
            function = getattr(library(), PREFIX + name)
            assert (function.restype, tuple(function.argtypes)) == expected
