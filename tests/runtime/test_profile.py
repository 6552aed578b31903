"""Profiles: every operator is there, communication as such, on real ranks too; traces are what Chrome reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import rich

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)
from hidet_dist.errors import ConfigError, HidetDistError, InputError
from hidet_dist.runtime.profile import OperatorTime, Profile, merge_traces

SERVE = Path(__file__).with_name("serve_partition.py")


@pytest.fixture(autouse=True)
def no_launcher(no_launch_variables: None) -> None:
    """One rank, in this process."""


WIDTH, LAYERS = 8, 3


def layers(batch: int | str, seq: int | str) -> hidet.FlowGraph:
    """Equal layers of two products each, which take few kernels, and a softmax."""
    rng = np.random.default_rng(0)
    x = y = hidet.symbol([batch, seq, WIDTH], "float32", "cpu")
    other = hidet.symbol([batch, seq, WIDTH], "float32", "cpu")
    for _ in range(LAYERS):
        up, down = (hidet.asarray(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)) for _ in range(2))
        y = hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(y, up)), down)
    return hidet.trace_from(hidet.ops.softmax(y + other, -1), [x, other])


def layer_inputs(batch: int, seq: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((batch, seq, WIDTH)).astype(np.float32) for _ in range(2)]


@pytest.fixture(scope="module", params=["concrete", "symbolic"])
def block(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "block"
    symbols = {} if request.param == "concrete" else {"batch": 2, "seq": 4}
    graph = layers(*(symbols or (2, 4)))
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {"symbols": symbols}, out)
    return out


def test_every_operator_has_its_time(block: Path) -> None:
    with hidet.distributed.load_partition(block, 0) as model:
        inputs = layer_inputs(2, 4)
        expected = model(*inputs)
        y = np.zeros_like(expected)
        profile = model.profile(*inputs, outputs=[y], repeats=3)
        np.testing.assert_array_equal(y, expected)
        assert [one.kernel for one in profile.operators] == [launch.kernel for launch in model.stage.launches]
        assert len(profile.operators) > 5
        assert {one.name for one in profile.operators} == set(model.stage.kernels)
        assert {"PanelMatmul"} < {one.name for one in profile.operators}
        end = 0.0
        for one in profile.operators:  # one after the other, within the call
            assert one.kind == "compute"
            assert one.begin_seconds >= end
            assert one.seconds > 0
            end = one.begin_seconds + one.seconds
        assert end < profile.call_seconds
        total = profile.compute_seconds + profile.communication_seconds + profile.overhead_seconds
        assert total == pytest.approx(profile.call_seconds)
        assert profile.overhead_seconds > 0
        assert profile.process_bytes is not None
        assert f"grown by {profile.process_bytes:,} bytes" in str(profile.table().caption)
        np.testing.assert_array_equal(model(*inputs), expected)
        with pytest.raises(ConfigError, match="repeats=0"):
            model.profile(*inputs, repeats=0)
        with pytest.raises(InputError, match="takes 2 inputs; 1"):
            model.profile(inputs[0])


def profile_of(rank: int) -> Profile:
    operators = (
        OperatorTime(0, "BlasMatmul", 0, "float32[2, 4]", "", 0.001, 0.004),
        OperatorTime(1, "AllReduce", 1, "float32[2, 4]", "all_reduce(sum, axes=0) float32[2, 4]", 0.006, 0.002),
        OperatorTime(2, "BlasMatmul", 0, "float32[2, 4]", "", 0.008, 0.001),
    )
    return Profile(rank, 2, 100.0 + rank, 0.010, operators)


def test_totals_and_table() -> None:
    profile = profile_of(1)
    assert profile.compute_seconds == pytest.approx(0.005)
    assert profile.communication_seconds == pytest.approx(0.002)
    assert profile.overhead_seconds == pytest.approx(0.003)
    console = rich.console.Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(profile.table())
    lines = console.export_text().splitlines()
    assert any("Rank 1 of 2: 10.000 ms" in line for line in lines)
    (matmul,) = (line for line in lines if "BlasMatmul" in line)
    assert "2" in matmul.split()
    assert "5.000" in matmul
    assert "50.0%" in matmul
    assert any("all_reduce(sum, axes=0)" in line and "2.000" in line for line in lines)
    assert any("overhead" in line and "3.000" in line for line in lines)


def check_trace(trace: dict[str, Any], ranks: list[int]) -> list[dict[str, Any]]:
    """Complete events and metadata only, as the trace event format has them; returns the former."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    complete = []
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        assert {"name", "pid", "tid", "args"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            complete.append(event)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} of 2" for rank in ranks}
    return complete


def test_a_trace_is_what_chrome_reads(tmp_path: Path) -> None:
    profile_of(0).save(tmp_path / "rank0.json")
    trace = json.loads((tmp_path / "rank0.json").read_text())
    call, first, reduce, _ = check_trace(trace, [0])
    assert (call["name"], call["dur"]) == ("call", pytest.approx(10_000))
    assert (first["name"], first["cat"], first["dur"]) == ("BlasMatmul", "compute", pytest.approx(4_000))
    assert first["ts"] - call["ts"] == pytest.approx(1_000, abs=0.1)
    assert (reduce["cat"], reduce["args"]["communicates"][:10]) == ("communication", "all_reduce")


def test_traces_of_ranks_are_merged(tmp_path: Path) -> None:
    profile_of(0).save(tmp_path / "rank0.json")
    merged = merge_traces([tmp_path / "rank0.json", profile_of(1)], tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text()) == merged
    calls = [event for event in check_trace(merged, [0, 1]) if event["name"] == "call"]
    assert [event["ts"] for event in calls] == pytest.approx([0, 1e6])
    for traces, says in (
        ([], "got no traces"),
        ([profile_of(0), tmp_path / "rank0.json"], "are both traces of rank 0"),
        ([tmp_path / "none.json"], "none.json is not a trace"),
    ):
        with pytest.raises(HidetDistError, match=says):
            merge_traces(traces)
    (tmp_path / "list.json").write_text('{"traceEvents": [3]}')
    with pytest.raises(HidetDistError, match="event 0 is 3, not an object"):
        merge_traces([tmp_path / "list.json"])


def test_two_ranks_say_what_they_communicate(tmp_path: Path) -> None:
    graph = layers("batch", "seq")
    pins = {f"w{number}": ("(R, S0)", "(S0, R)")[number % 2] for number in range(2 * LAYERS)}
    config = {"symbols": {"batch": 2, "seq": 4}, "pins": pins}
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [2]}, config, tmp_path / "out")
    np.savez(tmp_path / "inputs.npz", *layer_inputs(2, 4))
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", "2", "--timeout", "500", str(SERVE), "profile"]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), str(tmp_path)], capture_output=True, text=True, timeout=1000, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0:profiled", "1:profiled"]
    merged = merge_traces([tmp_path / f"rank{rank}.json" for rank in range(2)])
    events = check_trace(merged, [0, 1])
    sent = [event for event in events if event["cat"] == "communication"]
    assert len(sent) >= 2
    assert {event["cat"] for event in events} == {"call", "compute", "communication"}
    own, other = ([e["args"]["communicates"] for e in sent if e["pid"] == rank] for rank in range(2))
    assert own == other
    # A collective cannot end on one rank before it has begun on the other.
    for mine, theirs in zip(*([e for e in sent if e["pid"] == rank] for rank in range(2)), strict=True):
        assert mine["ts"] + mine["dur"] >= theirs["ts"]
        assert theirs["ts"] + theirs["dur"] >= mine["ts"]


def test_what_is_held_is_a_part_of_what_the_process_grows_by(tmp_path: Path) -> None:
    """A new process, since one that has freed memory takes it again without growing."""
    size = 4 * 2**20
    x = hidet.symbol([size], "float32", "cpu")
    graph = hidet.trace_from(x + hidet.asarray(np.arange(size, dtype=np.float32)), [x])
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "artifacts")
    program = (
        "import numpy, hidet_dist\n"
        f"x = numpy.ones({size}, numpy.float32)\n"
        "with hidet_dist.load_partition('artifacts') as model: print(model.profile(x).process_bytes)\n"
        "assert 'libgomp' in open('/proc/self/maps').read()  # else its threads would crash"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=100
    )
    assert 2 * 4 * size < int(done.stdout) < 2 * 4 * size + 2**26  # the weight and the result
