"""The two configurations: whatever is in them, they are either taken or refused with an error of hidet_dist."""

from __future__ import annotations

import math
import os
import re
import sys
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recorded import check_recorded

from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError, HidetDistError
from hidet_dist.limits import MOST_DEVICES, MOST_MACHINE_BYTES, MOST_SOLVER_THREADS
from hidet_dist.machine import builtin
from hidet_dist.options.option import options_of
from hidet_dist.options.planning import DistributedOptions
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize


class Unprintable:
    """An object that cannot be shown: every method fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    10**9,
    10**30,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
    1e-320,
    1.5,
    2j,
    "",
    "cpu",
    "\0",
    "\ud800",
    "x" * 100_000,
    "(S0, R)",
    "(" * 1000,
    "machine.json",
    "\0.json",
    "y" * 400 + ".json",
    "/proc/self/mem.json",
    b"",
    b"\x02\x02",
    bytearray(b"\x02"),
    memoryview(b"\x02"),
    array("i", [2]),
    [],
    (),
    {},
    set(),
    [None],
    [[]],
    [0],
    [10**9],
    [10**9] * 9,
    [1] * 100,
    [True],
    [2.0],
    ["2"],
    {"default": {}},
    {1: 2},
    {None: None},
    {"": ""},
    {"w0": "(S0, ?)"},
    {"op:0": "?"},
    {"batch": {"expected": 4, "multiple_of": 0}},
    {"batch": {"expected": 10**400}},
    {"batch": math.nan},
    {"batch": np.int64(3)},
    {"batch": SymbolSize(4, 3)},
    np.array([2, 2]),
    np.array(2),
    np.array([], np.float32),
    np.int64(2),
    np.float64(2),
    np.bool_(True),
    Path("/nowhere/machine.json"),
    Path(),
    object(),
    int,
    len,
    range(2, 3),
    iter([2]),
    DeviceMesh((2,)),
    TensorShardSpec(((0,), ())),
    SymbolSize(4, 2),
    builtin("cpu", DeviceMesh((2,))),
    hidet.asarray(np.zeros((2, 2), np.float32)),
]
# Values without a text, which hypothesis could not show either.
UNPRINTABLE: list[Any] = [10**5000, [10**5000], Unprintable(), [Unprintable()], {"w0": Unprintable()}, _nested(5000)]
SANE: dict[str, list[Any]] = {
    "mesh_shape": [[1], [2], (2, 2)],
    "mesh_axis_names": [["a"], ["a", "b"], ("é",)],
    "machine": ["cpu", "dgx-h100", "hgx-h200-pod"],
    "target": ["cpu", "cuda"],
    "arch": ["native", "x86-64-v2", "sm_90", "auto"],
    "solver": ["highs", "cbc"],
    "mode": ["search", "propagate"],
    "precision": ["float16"],
    "cuda": [{"mma": "simt"}, {}],
}
OPTIMIZATION = OptimizationConfig.keys()
DISTRIBUTED = list(options_of(DistributedOptions))


def odd_values() -> st.SearchStrategy[Any]:
    """Values of all kinds, alone and within lists and dicts."""
    leaf = st.sampled_from(ODD) | st.integers() | st.floats() | st.text() | st.binary()
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    )


def configs(keys: list[str]) -> st.SearchStrategy[dict[Any, Any]]:
    """Configs with any of the keys, and at times others."""
    known = st.fixed_dictionaries(
        {}, optional={key: odd_values() | st.sampled_from(SANE.get(key, [None])) for key in keys}
    )
    return known | st.builds(lambda a, b: {**a, **b}, known, st.dictionaries(st.text() | st.integers(), odd_values()))


@settings(max_examples=60, deadline=None)
@given(configs(DISTRIBUTED))
def test_distributed_configs_are_taken_or_refused(config: dict[Any, Any]) -> None:
    try:
        parsed = DistributedConfig.parse(config)
    except HidetDistError:
        return
    assert 1 <= parsed.mesh.size <= MOST_DEVICES and parsed.cluster.mesh == parsed.mesh


@settings(max_examples=100, deadline=None)
@given(configs(OPTIMIZATION))
def test_optimization_configs_are_taken_or_refused(config: dict[Any, Any]) -> None:
    try:
        parsed = OptimizationConfig.parse(config)
        parsed.target_on(builtin("cpu" if parsed.target == "cpu" else "dgx-h100", DeviceMesh((1,))).device)
    except HidetDistError:
        return
    assert parsed.target in ("cpu", "cuda")


def _line_of(number: int) -> str:
    """Describe an odd value in a line that is the same in every process."""
    if number >= len(ODD):
        return f"unprintable {number - len(ODD)}"
    text = f"{type(ODD[number]).__name__} {ODD[number]!r}"
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.split()))[:80]


def test_odd_values_are_refused_but_those_on_record() -> None:
    """Of all keys and odd values; the record lists those that are accepted."""
    accepted: dict[str, list[str]] = {}

    def parse(label: str, number: int, parse: Callable[[Any], Any]) -> None:
        try:
            parse([*ODD, *UNPRINTABLE][number])
        except ConfigError as error:
            assert len(str(error)) < 4000, "an error that nobody can read"
        else:
            accepted.setdefault(label, []).append(_line_of(number))

    for number in range(len(ODD) + len(UNPRINTABLE)):
        for key in OPTIMIZATION:
            for target in ("cpu", "cuda"):
                config = {"target": target} if key != "target" else {}
                parse(f"{key} ({target})", number, lambda value: OptimizationConfig.parse({**config, key: value}))  # noqa: B023
        for key in DISTRIBUTED:
            parse(key, number, lambda value: DistributedConfig.parse({"mesh_shape": [2], key: value}))  # noqa: B023
        parse("optimization_config", number, OptimizationConfig.parse)
        parse("distributed_config", number, DistributedConfig.parse)
    lines = [line for label in sorted(accepted) for line in (f"{label}:", *(f"  {value}" for value in accepted[label]))]
    check_recorded(Path(__file__).parent / "accepted_odd_values.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"mesh_shape": [10**9]}, f"at most {MOST_DEVICES} devices"),
        ({"mesh_shape": [1000, 1000]}, f"at most {MOST_DEVICES} devices"),
        ({"mesh_shape": [10**400]}, f"at most {MOST_DEVICES} devices"),
        ({"mesh_shape": b"\x02"}, "must be a list of ints"),
        ({"mesh_shape": np.array([2])}, "must be a list of ints"),
        ({"mesh_shape": [True]}, "whole number of devices"),
        ({"mesh_shape": [2, 2], "mesh_axis_names": "ab"}, "must be a list of names"),
        ({"mesh_shape": [2], "mesh_axis_names": [b"a"]}, "must be a list of names"),
    ],
)
def test_meshes_that_are_none(config: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DistributedConfig.parse(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"solver_threads": 10**30}, f"from 1 to {MOST_SOLVER_THREADS}"),
        ({"solver_time_limit_seconds": math.inf}, "got inf, more than the largest"),
        ({"solver_time_limit_seconds": math.nan}, "got nan"),
        ({"solver_time_limit_seconds": 10**400}, "more than the largest"),
        ({"solver_time_limit_seconds": True}, "got True"),
        ({"solver_gap": False}, "got False"),
        ({"mem_budget": 10**400}, "more than the largest"),
        ({"mode": np.array(["search"])}, "must be one of search, propagate"),
        ({"cuda": {"space": True}, "target": "cuda"}, "must be one of 0, 1, 2"),
        ({"cuda": {"space": None}, "target": "cuda"}, "must be one of 0, 1, 2"),
        ({"weights": "a\0b"}, "must be the path"),
    ],
)
def test_values_out_of_bounds(config: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OptimizationConfig.parse(config)


def _machine_file(path: Path, what: str) -> None:
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "sparse":
        path.touch()
        os.truncate(path, 8 * 2**30)
    elif what == "nested":
        path.write_text("[" * (10 * sys.getrecursionlimit()))
    else:
        path.write_text(what)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("pipe", "not a regular file"),
        ("folder", "Is a directory"),
        ("sparse", f"at most {MOST_MACHINE_BYTES}"),
        ("nested", "nested more than"),
        ("9" * 10_000, "Cannot read"),
        ('{"device": {"name": []}}', "must be a list with one link per mesh axis"),
        ('{"device": 1e999}', "must be a list with one link per mesh axis"),
    ],
)
def test_machine_files_that_are_none(what: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    _machine_file(path, what)
    with pytest.raises(ConfigError, match=says):
        DistributedConfig.parse({"mesh_shape": [2], "machine": str(path)})


def test_a_mesh_of_any_names_is_read_as_it_was_written() -> None:
    for mesh in (DeviceMesh((2, 3), ("é", "b·c")), DeviceMesh((MOST_DEVICES,))):
        assert DeviceMesh.parse(str(mesh)) == mesh
