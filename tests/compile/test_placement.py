"""Where a launcher puts the buffers of a workspace."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.compat.cpu_build import gcc
from hidet_dist.runtime import native

MOST = 6
SOURCE = f"""
#include <hidet_dist/placement.h>
static Placement<{MOST}> placement;
extern "C" void clear() {{ placement.clear(); }}
extern "C" int64_t place(int64_t nbytes) {{ return placement.place(nbytes); }}
extern "C" void release(int64_t begin, int64_t nbytes) {{ placement.free(begin, nbytes); }}
extern "C" int64_t used() {{ return placement.used(); }}
"""


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("placement")
    (folder / "placement.cc").write_text(SOURCE)
    command = [gcc(), "-std=c++11", "-Wall", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover", "-fPIC"]
    source, library = str(folder / "placement.cc"), str(folder / "placement.so")
    subprocess.run([*command, "-shared", f"-I{native.include_dir()}", source, "-o", library], check=True)
    functions = ctypes.CDLL(library)
    functions.place.restype = functions.used.restype = ctypes.c_int64
    return functions


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((0, 1, 128, 129, 500, 4096)), st.integers(0, MOST)), max_size=40))
def test_each_buffer_is_in_the_first_gap_that_is_large_enough(
    placement: ctypes.CDLL, steps: list[tuple[int, int]]
) -> None:
    """Each step frees one of the buffers, where there are so many, or else places one."""
    placement.clear()
    held: list[tuple[int, int]] = []  # the begin and the bytes of each
    for nbytes, freed in steps:
        if freed < len(held):
            begin, size = held.pop(freed)
            placement.release(ctypes.c_int64(begin), ctypes.c_int64(size))
        elif len(held) < MOST:
            begin = placement.place(ctypes.c_int64(nbytes))
            assert begin == first_gap(held, nbytes)
            held.append((begin, nbytes))
        assert placement.used() == max((end for _, end in ranges(held)), default=0)


def ranges(held: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of buffers in ascending order, in whole units of 128 bytes; empty buffers have none."""
    return sorted((begin, begin + -(-nbytes // 128) * 128) for begin, nbytes in held if nbytes)


def first_gap(held: list[tuple[int, int]], nbytes: int) -> int:
    at = 0
    for begin, end in ranges(held) if nbytes else []:
        if begin - at >= nbytes:  # gaps are whole units
            break
        at = end
    return at
