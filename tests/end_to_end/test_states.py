"""Programs with states: what calls write, later calls find, on one rank and on several."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.frontends.test_states import Keeping, inputs

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import CommunicationError, CompileError, InputError
from hidet_dist.runtime.process import resident_bytes

from .conftest import launch


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def check_call(partition: Any, module: torch.nn.Module, call: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        expected = module(*call)
    for y, want in zip(partition(*(x.numpy() for x in call)), expected, strict=True):
        np.testing.assert_allclose(y, want.numpy(), rtol=1e-5, atol=1e-5)


def test_states_are_kept_from_call_to_call_saved_loaded_and_reset(tmp_path: Path):
    torch.manual_seed(0)
    module = Keeping().eval()
    initial = {name: x.clone() for name, x in module.named_buffers()}
    hidet_dist.auto_parallel(hidet_dist.from_torch(module, inputs()), {"mesh_shape": [1]}, {}, tmp_path / "built")
    with hidet_dist.load_partition(tmp_path / "built") as partition:
        assert partition.states.keys() == initial.keys()
        for _ in range(2):
            check_call(partition, module, inputs())
            partition.warm_up()
            partition.profile(*(x.numpy() for x in inputs()))
        for name, x in module.named_buffers():
            np.testing.assert_allclose(partition.save_states()[name], x.numpy(), rtol=1e-5, atol=1e-5)

        saved, call = partition.save_states(), inputs()
        first = partition(*(x.numpy() for x in call))
        partition.load_states(saved)
        for y, again in zip(first, partition(*(x.numpy() for x in call)), strict=True):
            np.testing.assert_array_equal(y, again)
        for wrong in ({"pool": np.zeros((3, 4, 2), np.float32)}, {"other": np.zeros(2)}, {"count": np.zeros(())}):
            with pytest.raises(InputError, match="state"):
                partition.load_states(wrong)

        partition.reset()
        for name, x in module.named_buffers():
            x.copy_(initial[name])
        check_call(partition, module, inputs())


class Pool(torch.nn.Module):
    """Rows that calls write to a pool, of which each call reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 64)
        self.down = torch.nn.Linear(64, 64)
        values = torch.arange(4096 * 64) % 7 - 3  # small whole numbers, whose sums are exact in any order
        self.register_buffer("pool", values.float().reshape(4096, 64))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.pool[slots] = torch.relu(self.up(x))
        return self.down(self.pool.sum(0, keepdim=True) + x)


def test_ranks_hold_shards_of_states_and_agree(tmp_path: Path):
    """The budget has no room for the whole pool on a rank."""
    torch.manual_seed(0)
    module = Pool().eval()
    generator = np.random.default_rng(0)
    calls = [
        (generator.standard_normal((n, 64), np.float32), generator.permutation(4096)[:n].astype(np.int64))
        for n in (3, 1, 7)
    ]
    tokens = torch.export.Dim("tokens", min=1)
    graph = hidet_dist.from_torch(
        module, (torch.zeros(3, 64), torch.zeros(3, dtype=torch.int64)), ({0: tokens}, {0: tokens})
    )
    options = {"symbols": {"tokens": 3}, "mem_budget": 4096 * 64 * 4 * 3 // 4}
    hidet_dist.auto_parallel(graph, {"mesh_shape": [2]}, options, tmp_path / "built")
    (state,) = Manifest.load(tmp_path / "built").programs[0].stages[0].states
    assert state.shape in ((4096, 32), (2048, 64)) and state.whole_shape == (4096, 64)

    initial = module.pool.clone()
    answers = {}
    with torch.no_grad():
        for number, (x, slots) in enumerate(calls):
            answers[f"y{number}"] = module(torch.from_numpy(x), torch.from_numpy(slots)).numpy()
        pool = module.pool.clone().numpy()
        module.pool.copy_(initial)
        answers["after_reset"] = module(*map(torch.from_numpy, calls[0])).numpy()
    parts = [told["state pool"] for told in served(2, tmp_path, [("main", call) for call in calls], answers)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1 if state.shape[1] == 32 else 0), pool, rtol=1e-5, atol=1e-5)


def served(
    ranks: int, folder: Path, calls: Sequence[tuple[str, Sequence[np.ndarray]]], answers: Mapping[str, np.ndarray]
) -> list[dict[str, np.ndarray]]:
    """Let ranks make calls of programs in ``folder / "built"``, check answers, and return what each rank told."""
    given = {f"{n}:{program}:{k}": x for n, (program, call) in enumerate(calls) for k, x in enumerate(call)}
    np.savez(folder / "calls.npz", **given)
    done = launch(ranks, Path(__file__).with_name("serve_states.py"), folder / "built", folder / "calls.npz", folder)
    assert done.returncode == 0, done.stderr
    told = []
    for rank in range(ranks):
        with np.load(folder / f"rank{rank}.npz") as file:
            told.append(dict(file))
        for name, want in answers.items():
            np.testing.assert_allclose(told[rank][name], want, rtol=1e-4, atol=1e-4)
    return told


def test_nothing_of_a_state_is_moved_but_what_is_written(tmp_path: Path):
    """Pages of a state take memory once they are written to, so a copy of it, or a write to all of it, would show."""
    rows, width = 2**17, 256
    pool = hidet_dist.state("pool", [rows, width])
    x, slots = hidet.symbol([3, width], "float32", "cpu"), hidet.symbol([3], "int64", "cpu")
    new = hidet_dist.write_rows(pool, slots, x)
    found = hidet.ops.take(new, slots, 0)
    graph = hidet.trace_from([hidet.ops.sum(found, [0]), new], [x, slots])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "built")
    whole = rows * width * 4
    with hidet_dist.load_partition(tmp_path / "built") as partition:
        before = resident_bytes()
        for number in range(8):
            values = np.full((3, width), number, np.float32)
            at = np.array([8, 2**16, rows - 1], np.int64) - number
            np.testing.assert_array_equal(partition(values, at), values.sum(0))
        after = resident_bytes()
        assert before is not None and after is not None
        assert after - before < whole // 4
        saved = partition.save_states()["pool"]
    assert {int(row) for row in np.flatnonzero(saved.any(1))} == {
        start - number for start in (8, 2**16, rows - 1) for number in range(1, 8)
    }


def test_a_call_that_ends_while_it_writes_states_closes_the_partition(tmp_path: Path):
    """A signal arrives while kernels run. Nobody could tell which rows have been written."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    pool = hidet_dist.state("pool", [4, 1024])
    x, slots = hidet.symbol([1024, 1024], "float32", "cpu"), hidet.symbol([1024], "int64", "cpu")
    y = x
    for _ in range(20):
        y = hidet.ops.matmul(y, x)
    new = hidet_dist.write_rows(pool, slots, y)
    graph = hidet.trace_from([hidet.ops.sum(new, [0]), new], [x, slots])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "built")
    call = np.zeros((1024, 1024), np.float32), np.zeros(1024, np.int64)
    with hidet_dist.load_partition(tmp_path / "built") as partition:
        partition(*call)
        with pytest.raises(InputError):
            partition(call[0][:3], call[1])
        partition(*call)  # a call that was refused has changed nothing
        previous = signal.signal(signal.SIGALRM, stop)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                for _ in range(100):
                    partition(*call)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        with pytest.raises(CommunicationError, match="states may be half written"):
            partition(*call)


def test_a_state_that_would_have_to_be_copied_is_refused():
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pool", torch.zeros(4, 3))

        def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            before = self.pool.clone()
            self.pool[slots] = x
            return torch.matmul(before, self.pool.transpose(0, 1))

    graph = hidet_dist.from_torch(Reads().eval(), (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
    check_refused(graph, "'pool' would have to be copied: Matmul, which makes float32[4, 4], reads its old value")


def check_refused(graph: hidet.FlowGraph, message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        hidet_dist.Traced.of(graph, {"mesh_shape": [1]}, {}).prepare().plan().partition().compile()


def test_states_that_would_have_to_be_updated_each_before_the_other_are_refused():
    first, second = (hidet_dist.state(name, [4, 3]) for name in ("first", "second"))
    x, slots = hidet.symbol([2, 3], "float32", "cpu"), hidet.symbol([2], "int64", "cpu")
    new_first, new_second = hidet_dist.write_rows(first, slots, x), hidet_dist.write_rows(second, slots, x)
    y = hidet.ops.matmul(first, hidet.ops.transpose(new_second, [1, 0]))
    z = hidet.ops.sum(second * new_first, [1])
    graph = hidet.trace_from([y, z, new_first, new_second], [x, slots])
    check_refused(graph, "'first' would have to be copied: Matmul, which makes float32[4, 4], reads its old value")


def test_an_update_waits_for_that_of_another_state(tmp_path: Path):
    """What is read of the first state before its update must not be computed with the second one's new value."""
    first, second = (hidet_dist.state(name, [4, 3]) for name in ("first", "second"))
    x, slots = hidet.symbol([2, 3], "float32", "cpu"), hidet.symbol([2], "int64", "cpu")
    new_first, new_second = hidet_dist.write_rows(first, slots, x), hidet_dist.write_rows(second, slots, -x)
    outputs = [first * 3.0 + new_second, second * 2.0 + new_first]
    hidet_dist.auto_parallel(
        hidet.trace_from([*outputs, new_first, new_second], [x, slots]), {"mesh_shape": [1]}, {}, tmp_path / "built"
    )
    held = np.zeros((2, 4, 3), np.float32)
    with hidet_dist.load_partition(tmp_path / "built") as partition:
        for number, at in enumerate(([0, 2], [2, 3], [3, 0])):
            values, old = np.arange(6, dtype=np.float32).reshape(2, 3) + number, held.copy()
            held[:, at] = values, -values
            y, z = partition(values, np.array(at, np.int64))
            np.testing.assert_array_equal(y, old[0] * 3 + held[1])
            np.testing.assert_array_equal(z, old[1] * 2 + held[0])


def test_programs_of_a_family_share_their_states(tmp_path: Path):
    """One program writes rows, and the other one, for other numbers of rows, finds them."""
    pool = hidet_dist.state("pool", [8, 4])

    def graph(rows: int) -> hidet.FlowGraph:
        x, slots = hidet.symbol([rows, 4], "float32", "cpu"), hidet.symbol([rows], "int64", "cpu")
        new = hidet_dist.write_rows(pool, slots, x)
        return hidet.trace_from([hidet.ops.sum(new, [0]), new], [x, slots])

    hidet_dist.build_family({"many": graph(3), "one": graph(1)}, {"mesh_shape": [1]}, {}, tmp_path / "built")
    with hidet_dist.load_partition(tmp_path / "built") as partition:
        held = np.zeros((8, 4), np.float32)
        for name, slots in (("many", [1, 5, 2]), ("one", [5]), ("many", [0, 7, 5])):
            x = np.random.default_rng(len(slots)).standard_normal((len(slots), 4), np.float32)
            held[slots] = x
            got = partition.program(name)(x, np.array(slots, np.int64))
            np.testing.assert_allclose(got, held.sum(0), rtol=1e-5, atol=1e-6)


HEADS, SIZE = 4, 8


def steps(rows: int, counts: Mapping[str, int]) -> dict[str, hidet.FlowGraph]:
    """Steps of tokens that write a pool of heads, and read three rows of it for each token."""
    graphs, width = {}, HEADS * SIZE
    query, out = (hidet_dist.weight(name, [width, width], "float32") for name in ("query", "out"))
    for name, tokens in counts.items():
        x, slots = hidet.symbol([tokens, width]), hidet.symbol([tokens], "int64")
        table = hidet.symbol([tokens, 3], "int64")
        heads = hidet.ops.reshape(x @ query, [tokens, HEADS, SIZE])
        pool = hidet_dist.write_rows(hidet_dist.state("pool", [rows, HEADS, SIZE]), slots, heads)
        read = hidet.ops.sum(hidet.ops.take(pool, table, 0), [1]) * heads
        y = hidet.ops.reshape(read, [tokens, width]) @ out
        graphs[name] = hidet.trace_from([y, pool], [x, slots, table])
    return graphs


@pytest.mark.parametrize(
    ("mesh", "own"),
    [
        ({"mesh_shape": [3]}, (2, 1, 1)),
        pytest.param(
            {"mesh_shape": [2], "mesh_axis_names": ["gpu"], "shares": {"gpu": [3, 1]}}, (3, 1), marks=pytest.mark.slow
        ),
    ],
)
def test_programs_share_a_state_whose_heads_ranks_hold_in_unequal_parts(
    tmp_path: Path, mesh: dict[str, Any], own: tuple[int, ...]
):
    """The budget has no room for the whole pool on a rank, and the ranks do not divide its heads."""
    rows, ranks, rng = 4096, len(own), np.random.default_rng(0)
    weights = {
        name: torch.from_numpy(rng.standard_normal((HEADS * SIZE,) * 2, np.float32) / 4) for name in ("query", "out")
    }
    save_file(weights, tmp_path / "weights.safetensors")
    whole = rows * HEADS * SIZE * 4
    options = {
        "mem_budget": whole * (max(own) + 1) // sum(own),
        "weights": {"files": [tmp_path / "weights.safetensors"]},
    }
    result = hidet_dist.build_family(steps(rows, {"prefill": 5, "decode": 2}), mesh, options, tmp_path / "built")
    specs = {str(plan.stages[0].states[0].spec) for plan in result.plans.values()}
    assert len(specs) == 1 and specs != {"(R, R, R)"}
    for program in Manifest.load(tmp_path / "built").programs:
        shapes = [program.stages[0].at(rank).states[0].local_shape for rank in range(ranks)]
        assert shapes == [(rows, heads, SIZE) for heads in own]

    def step(pool: np.ndarray, x: np.ndarray, slots: np.ndarray, table: np.ndarray) -> np.ndarray:
        heads = (x @ weights["query"].numpy()).reshape(-1, HEADS, SIZE)
        pool[slots] = heads
        answer: np.ndarray = (pool[table].sum(1) * heads).reshape(len(x), -1) @ weights["out"].numpy()
        return answer

    calls, answers, pool = [], {}, np.zeros((rows, HEADS, SIZE), np.float32)
    for number, (name, tokens) in enumerate((("prefill", 5), ("decode", 2), ("decode", 2), ("prefill", 5))):
        slots = rng.permutation(8)[:tokens]
        call = rng.standard_normal((tokens, HEADS * SIZE), np.float32), slots, rng.integers(0, 8, (tokens, 3))
        calls.append((name, call))
        answers[f"y{number}"] = step(pool, *call)
    answers["after_reset"] = step(np.zeros_like(pool), *calls[0][1])
    parts = [told["state pool"] for told in served(ranks, tmp_path, calls, answers)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), pool, rtol=1e-5, atol=1e-5)
