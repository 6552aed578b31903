"""Programs with states on the stand-ins for CUDA, with emulated kernels: what calls write, and what leaves it alone."""

from __future__ import annotations

import sys
from pathlib import Path

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from tests.emulator.emulated import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import as_cuda, serve

import hidet_dist
from hidet_dist.weights.states import held_state

COUNTS = (3, 2, 3, 3, 6)
SHAPES = {"pool": (12, 4, 2), "grid": (2, 6, 3, 4), "window": (3, 5, 2), "hidden": (7,)}


def initial() -> dict[str, np.ndarray]:
    states = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    states["pool"] = np.arange(96, dtype=np.float32).reshape(SHAPES["pool"])
    states["hidden"] = states["hidden"].astype(np.float16)
    return states


def graph() -> hidet.FlowGraph:
    """Every update, of a number of rows that is not known; and a reader of an old value."""
    pool = held_state("pool", torch.from_numpy(initial()["pool"]))
    grid, window = hidet_dist.state("grid", SHAPES["grid"]), hidet_dist.state("window", SHAPES["window"])
    hidden = hidet_dist.state("hidden", SHAPES["hidden"], "float16")
    inputs = [
        hidet.symbol(["n"], "int64", "cpu"),
        hidet.symbol(["n"], "int32", "cpu"),
        hidet.symbol(["n"], "int32", "cpu"),
        hidet.symbol(["n", 4, 2], "float32", "cpu"),
        hidet.symbol(["n", 2, 4], "float32", "cpu"),
        hidet.symbol([3, "n", 2], "float32", "cpu"),
        hidet.symbol([7], "float16", "cpu"),
    ]
    slots, first, second, rows, pieces, added, fresh = inputs
    new = [
        hidet_dist.write_rows(pool, slots, rows),
        hidet_dist.write_rows(grid, [first, second], pieces, dims=(1, 2)),
        hidet_dist.shift_state(window, added, 1),
        hidet_dist.replace_state(hidden, fresh),
    ]
    return hidet.trace_from([ops.sum(new[0], [1, 2]), ops.cast(hidden, "float32") * 2.0, *new], inputs)


def call(count: int, seed: int) -> list[np.ndarray]:
    """Slots out of range and equal ones among them."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(12)[:count].astype(np.int64)
    first, second = (rng.integers(0, most, count).astype(np.int32) for most in (6, 3))
    slots[-1], first[0] = (-1, 12, slots[0])[seed % 3], (6, -5)[seed % 2]
    first[-1], second[-1] = first[1 % count], second[1 % count]
    shapes = ((count, 4, 2), (count, 2, 4), (3, count, 2), (7,))
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [slots, first, second, *values[:3], values[3].astype(np.float16)]


def applied(states: dict[str, np.ndarray], inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The results of a call by NumPy, which writes the states."""
    slots, first, second, rows, pieces, added, fresh = inputs
    doubled = states["hidden"].astype(np.float32) * 2
    for n in range(len(slots)):
        if 0 <= slots[n] < 12:
            states["pool"][slots[n]] = rows[n]
        if 0 <= first[n] < 6 and 0 <= second[n] < 3:
            states["grid"][:, first[n], second[n]] = pieces[n]
    states["window"] = np.concatenate([states["window"], added], 1)[:, -5:]
    states["hidden"] = fresh
    return [states["pool"].sum((1, 2)), doubled]


@pytest.fixture(scope="module")
def built(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "artifacts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_HOME", str(emulator.home))
        config = {"target": "cuda", "arch": "sm_90", "symbols": {"n": 3}, "cuda": {"cublas": False}}
        hidet_dist.auto_parallel(graph(), {"mesh_shape": [1]}, config, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("as_graph", [False, True])
def test_states_are_kept_saved_loaded_and_reset(built: Path, stand_ins: Path, as_graph: bool) -> None:
    """A graph is captured at the second call of a size, and replayed from then on."""
    calls = [call(count, seed) for seed, count in enumerate(COUNTS)]
    np.savez(f"{built}.npz", **{f"{n}_{i}": x for n, inputs in enumerate(calls) for i, x in enumerate(inputs)})
    (found,) = serve(stand_ins, "states", as_cuda(built, cuda_graph=as_graph))
    assert not isinstance(found, str), found
    states, expected = initial(), []
    for inputs in calls:
        expected.append(applied(states, inputs))
    after = {name: x.copy() for name, x in states.items()}
    expected.append(applied(states, calls[0]))
    expected.append(expected[-1])  # after what was saved is loaded
    expected.append(applied(initial(), calls[0]))
    for answers, wanted in zip(found["answers"], expected, strict=True):
        for y, whole in zip(answers, wanted, strict=True):
            np.testing.assert_allclose(np.float32(y), whole, rtol=1e-5, atol=1e-5)
    for name, value in after.items():
        np.testing.assert_array_equal(np.asarray(found["saved"][name], value.dtype), value)
    assert "The state pool must be float32[12, 4, 2]" in found["refused"][0]
    assert "must be float32" in found["refused"][1]
