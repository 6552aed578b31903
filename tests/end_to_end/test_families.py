"""Several programs over one set of weights, in one artifact folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.cli.app import app
from hidet_dist.cli.running import main as run_one_rank
from hidet_dist.errors import ConfigError, InfeasibleError, InputError, PlanError, WeightsError
from hidet_dist.export.storage import held_bytes, share_storage
from hidet_dist.phases.family import TracedFamily
from hidet_dist.simulate import simulate
from hidet_dist.weights.named import held_weight
from hidet_dist.weights.states import held_state

from .conftest import launch

ROWS = {"prefill": 24, "decode": 1}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def weights(hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights of a gated layer: both halves of the hidden layer in one matrix, and the way back."""
    rng = np.random.default_rng(0)
    shapes = (hidden, 2 * hidden), (hidden, hidden)
    first, second = (rng.standard_normal(shape, np.float32) / hidden**0.5 for shape in shapes)
    return first, second


def layers(hidden: int, rows: Mapping[str, int | str] = ROWS, shared: bool = True) -> dict[str, hidet.FlowGraph]:
    """A gated layer for several numbers of rows; its graphs have the same constants, or constants of equal elements."""
    graphs, known = {}, [hidet.asarray(x) for x in weights(hidden)]
    for name, count in rows.items():
        up, down = known if shared else [hidet.asarray(x) for x in weights(hidden)]
        x = hidet.symbol([count, hidden], "float32", "cpu")
        gate, value = hidet.ops.split(x @ up, 2, axis=1)
        graphs[name] = hidet.trace_from(hidet.ops.relu(gate) * value @ down, [x])
    return graphs


def expected(x: np.ndarray) -> np.ndarray:
    """What the layer computes."""
    up, down = weights(x.shape[1])
    gate, value = np.split(x @ up, 2, axis=1)
    result: np.ndarray = (np.maximum(gate, 0) * value) @ down
    return result


def inputs(hidden: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal((rows, hidden), np.float32) for name, rows in ROWS.items()}


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_ranks_and_folders_hold_the_weights_of_two_programs_once(tmp_path: Path) -> None:
    """A second program costs at most 5 % of what one takes: of the folder, and of the ranks' memory of each kind."""
    hidden, mesh = 2048, {"mesh_shape": [2]}
    graphs, sizes, used = layers(hidden), {}, {}
    result = hidet_dist.build_family(graphs, mesh, {"mem_budget": 30_000_000}, tmp_path / "both")
    specs = [[str(w.spec) for w in plan.stages[0].weights] for plan in result.plans.values()]
    assert specs[0] == specs[1] and "(R, R)" not in specs[0]
    assert result.weight_bytes_per_rank == [3 * hidden * hidden * 4 // 2] * 2
    assert max(result.held_bytes_per_stage) <= 30_000_000
    hidet_dist.auto_parallel(graphs["prefill"], mesh, {}, tmp_path / "one", plan=result.plans["prefill"])
    given = inputs(hidden)
    np.savez(tmp_path / "given.npz", main=given["prefill"], **given)
    for name in ("one", "both"):
        (tmp_path / f"{name}-out").mkdir()
        serve = Path(__file__).with_name("serve_family.py")
        done = launch(2, serve, tmp_path / name, tmp_path / "given.npz", tmp_path / f"{name}-out")
        assert done.returncode == 0, done.stderr
        sizes[name] = folder_bytes(tmp_path / name)
        used[name] = [json.loads((tmp_path / f"{name}-out" / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank in range(2):
        with np.load(tmp_path / "both-out" / f"rank{rank}.npz") as answers:
            for name, x in given.items():
                np.testing.assert_allclose(answers[name], expected(x), atol=1e-4)
        one, both = (
            {
                "resident": of[rank]["Rss"],
                "private": of[rank]["Private_Clean"] + of[rank]["Private_Dirty"],
            }
            for of in (used["one"], used["both"])
        )
        assert one["private"] > 3 * hidden * hidden * 4 // 2  # the rank's weights are among it
        assert all(both[kind] <= 1.05 * one[kind] for kind in one), (one, both)
    assert sizes["both"] <= 1.05 * sizes["one"], sizes


def test_a_partition_of_several_programs_is_called_by_their_names(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = {"prefill": "rows", "decode": 1}
    result = hidet_dist.build_family(
        layers(16, rows, shared=False),
        {"mesh_shape": [1]},
        {"symbols": {"rows": 24}},
        out,
        {"prefill": {"frequency": 0.1}},
    )
    assert result.weight_bytes_per_rank == [3 * 16 * 16 * 4]  # equal constants of two graphs are stored once
    assert result.predicted_seconds == pytest.approx(
        0.1 * result.plans["prefill"].seconds + result.plans["decode"].seconds
    )
    manifest = Manifest.load(out)
    assert [program.name for program in manifest.programs] == ["prefill", "decode"]
    assert manifest.weights_files == ["weights/rank0.safetensors"]
    assert (out / "programs/decode/plan.json").is_file() and not (out / "plan.json").exists()
    given = inputs(16)
    with hidet_dist.load_partition(out, 0) as partition:
        assert partition.programs == ("prefill", "decode")
        prefill, decode = map(partition.program, partition.programs)
        for rows_now in (24, 3, 200, 7):  # the workspace moves where it grows
            x = np.random.default_rng(rows_now).standard_normal((rows_now, 16), np.float32)
            np.testing.assert_allclose(prefill(x), expected(x), atol=1e-4)
            np.testing.assert_allclose(decode(given["decode"]), expected(given["decode"]), atol=1e-4)
        with pytest.raises(InputError, match=r"must have the shape \[1, 16\]"):
            decode(given["prefill"])
        for call in (lambda: partition(given["decode"]), lambda: partition.stage, lambda: partition.program("train")):
            with pytest.raises(ConfigError, match="the programs prefill, decode"):
                call()
    np.savez(tmp_path / "x.npz", x0=given["decode"])
    assert run_one_rank(str(out), "decode", str(tmp_path / "x.npz"), str(tmp_path / "y.npz"), str(tmp_path)) == 0
    with np.load(tmp_path / "y.npz") as answer:
        np.testing.assert_allclose(answer["y0"], expected(given["decode"]), atol=1e-4)
    for command in ("explain", "report"):
        done = CliRunner().invoke(app, [command, str(out), "--program", "decode", "--json"])
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["fingerprint"] == result.plans["decode"].stages[0].fingerprint
        refused = CliRunner().invoke(app, [command, str(out)])
        assert refused.exit_code == 1 and "the programs prefill, decode: name one" in refused.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_programs_over_one_storage_compute_what_their_graphs_do(shared: bool) -> None:
    """In the simulator: weights that programs share have one name, spec and source in both."""
    family = TracedFamily.of(layers(16, shared=shared), {"mesh_shape": [2]}, {"mem_budget": 8000}).prepare()
    partitioned = family.plan().partition()
    (prefill,), (decode,) = (partitioned.members[name].programs for name in ROWS)
    names = [[weight.name for weight in program.weights] for program in (prefill, decode)]
    assert names[0] == names[1]
    own = sum(w.local_nbytes(decode.mesh, (0,)) for w in decode.weights)
    assert held_bytes([prefill, decode], 0) == own and partitioned.beside(partitioned.members["decode"]) == [[0, 0]]
    for name, x in inputs(16).items():
        (y,) = simulate(partitioned.members[name].programs[0], [x])
        np.testing.assert_allclose(y, expected(x), atol=1e-4)
    with pytest.raises(InfeasibleError):
        family.plan_within(100)


def test_a_graph_is_planned_for_several_sizes_of_its_symbolic_dims() -> None:
    (graph,) = layers(16, {"any": "rows"}).values()
    own = {"prefill": {"symbols": {"rows": 512}}, "decode": {"symbols": {"rows": 2}}}
    family = TracedFamily.of(dict.fromkeys(own, graph), {"mesh_shape": [2]}, {}, own).prepare().plan()
    sizes = [[symbol.size for symbol in one.plan.stages[0].symbols] for one in family.members.values()]
    assert sizes == [[512], [2]]
    assert family.members["prefill"].plan.seconds > family.members["decode"].plan.seconds
    (prefill,), (decode,) = (one.programs for one in family.partition().members.values())
    assert [w.name for w in prefill.weights] == [w.name for w in decode.weights]
    x = np.random.default_rng(2).standard_normal((6, 16), np.float32)
    for program in (prefill, decode):
        np.testing.assert_allclose(simulate(program, [x])[0], expected(x), atol=1e-4)


def test_programs_share_equal_kernels(tmp_path: Path) -> None:
    """Those of a graph that is planned for several sizes of its symbolic dims; each program serves any of them."""
    (graph,) = layers(16, {"any": "rows"}).values()
    own = {"prefill": {"symbols": {"rows": 512}}, "decode": {"symbols": {"rows": 2}}}
    out = tmp_path / "out"
    hidet_dist.build_family(dict.fromkeys(own, graph), {"mesh_shape": [1]}, {}, out, own)
    prefill, decode = (program.stages[0] for program in Manifest.load(out).programs)
    assert len(prefill.kernels) > 1 and prefill.kernel_files() == decode.kernel_files()
    written = [path.relative_to(out).as_posix() for path in out.rglob("*.so") if path.name != "launcher.so"]
    assert sorted(written) == sorted(prefill.kernel_files())
    with hidet_dist.load_partition(out) as partition:
        for rows, name in ((5, "prefill"), (3, "decode"), (9, "decode"), (1, "prefill")):
            x = np.random.default_rng(rows).standard_normal((rows, 16), np.float32)
            np.testing.assert_allclose(partition.program(name)(x), expected(x), atol=1e-4)


def pool_of(steps: Mapping[str, int], up: np.ndarray) -> dict[str, hidet.FlowGraph]:
    """Steps of several numbers of tokens, each of which writes rows of one pool, and reads rows of it."""
    graphs = {}
    for name, tokens in steps.items():
        x, slots = hidet.symbol([tokens, 8]), hidet.symbol([tokens], "int64")
        pool = hidet_dist.write_rows(hidet_dist.state("pool", [32, 8]), slots, x @ hidet.asarray(up))
        read = hidet.ops.take(pool, hidet.symbol([4], "int64"), 0)
        graphs[name] = hidet.trace_from([read * 2.0, pool], [x, slots, read.op.inputs[1]])
    return graphs


def test_programs_share_states_by_their_names() -> None:
    """In the simulator: what one program writes, the other finds. The pool is held once, split by the budget."""
    rng = np.random.default_rng(0)
    up = rng.integers(-4, 5, (8, 8)).astype(np.float32)
    graphs = pool_of({"prefill": 6, "decode": 1}, up)
    family = TracedFamily.of(graphs, {"mesh_shape": [2]}, {"mem_budget": 1500}).prepare()
    partitioned = family.plan().partition()
    (prefill,), (decode,) = (partitioned.members[name].programs for name in ROWS)
    assert [state.name for state in prefill.states] == [state.name for state in decode.states] == ["s0"]
    assert held_bytes([prefill, decode], 0) <= 8 * 8 * 4 + 32 * 8 * 4 // 2
    states: dict[str, np.ndarray] = {}
    rows, later = (rng.integers(-4, 5, (count, 8)).astype(np.float32) for count in (6, 1))
    simulate(prefill, [rows, np.array([3, 9, 0, 31, 7, 8]), np.arange(4)], states=states)
    (y,) = simulate(decode, [later, np.array([9]), np.array([31, 9, 5, 3])], states=states)
    np.testing.assert_array_equal(y, 2 * np.stack([rows[3] @ up, later[0] @ up, np.zeros(8), rows[0] @ up]))


def test_a_weight_has_one_spec_in_all_programs() -> None:
    programs = []
    for spec in ("(R, S0)", "(S0, R)"):
        (graph,) = layers(16, {"decode": 1}).values()
        prepared = hidet_dist.Traced.of(graph, {"mesh_shape": [2]}, {"pins": {"w2": spec}}).prepare()
        programs.append(prepared.plan().partition().programs[0])
    keys = {weight.name: weight.name for weight in programs[0].weights}
    with pytest.raises(PlanError, match=r"w2 is float32\[16, 16\] in \(S0, R\) in one program"):
        share_storage(programs, [keys, keys])


def test_tensors_of_one_name_and_other_elements_are_refused(tmp_path: Path) -> None:
    """It would not be known which one is to be stored."""
    x, data = hidet.symbol([4, 8]), torch.arange(64.0).reshape(8, 8)
    for kind in ("weight", "state"):
        graphs = {}
        for name, held in (("a", data), ("b", data.clone()), ("c", data + 1)):
            if kind == "weight":
                graphs[name] = hidet.trace_from(x @ held_weight("up", held), [x])
            else:
                new = hidet_dist.replace_state(held_state("seen", held), hidet.ops.concat([x, x], 0))
                graphs[name] = hidet.trace_from([x * 2.0, new], [x])
        equal = {name: graphs[name] for name in "ab"}
        TracedFamily.of(equal, {"mesh_shape": [1]}).prepare().check_weights()
        with pytest.raises(WeightsError, match=rf"The {kind} '\w+' has other elements in the program 'c' than in 'a'"):
            hidet_dist.build_family(graphs, {"mesh_shape": [1]}, {}, tmp_path / "out")


@pytest.mark.parametrize(
    ("graphs", "config", "own", "says"),
    [
        ({}, {}, {}, "by the names of programs"),
        ({"../x": "decode"}, {}, {}, "The name of a program must be up to 64"),
        ({"a": "decode"}, {}, {"b": {}}, "the graphs are a"),
        ({"a": "decode"}, {}, {"a": {"pin": {}}}, "Unknown key 'pin'"),
        ({"a": "decode"}, {}, {"a": {"frequency": 0}}, "must be above 0"),
        ({"a": "decode"}, {"symbols": {"n": 2}}, {}, "'n', which no graph has"),
        ({"a": "decode"}, {"mode": "propagate"}, {}, "planned together, by a search"),
    ],
)
def test_what_does_not_fit_a_family_is_refused(
    graphs: dict[str, str], config: dict[str, Any], own: dict[str, Any], says: str, tmp_path: Path
) -> None:
    given = {name: layers(16)[of] for name, of in graphs.items()}
    with pytest.raises(ConfigError, match=says):
        hidet_dist.build_family(given, {"mesh_shape": [1]}, config, tmp_path / "out", own)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_programs_of_pipelines_share_stages_and_weights(tmp_path: Path) -> None:
    hidden, out = 16, tmp_path / "both"
    result = hidet_dist.build_family(layers(hidden), {"mesh_shape": [2]}, {"objective": "latency", "stages": 2}, out)
    assert all(plan.pipeline is not None and len(plan.stages) == 2 for plan in result.plans.values())
    given = inputs(hidden)
    np.savez(tmp_path / "given.npz", **given)
    (tmp_path / "out").mkdir()
    done = launch(2, Path(__file__).with_name("serve_family.py"), out, tmp_path / "given.npz", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        with np.load(tmp_path / "out" / f"rank{rank}.npz") as answers:
            for name, x in given.items():
                np.testing.assert_allclose(answers[name], expected(x), atol=1e-4)
