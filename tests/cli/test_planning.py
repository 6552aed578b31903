"""``hidet-dist plan``, ``build`` and ``run`` on a small model, as users start them."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import hidet
import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import hidet_dist
from hidet_dist.cli.app import app
from hidet_dist.cli.request import PlanRequest
from hidet_dist.cli.summary import summarize
from hidet_dist.report import Report
from hidet_dist.report.measured import read_traces
from hidet_dist.search import one_graph
from hidet_dist.search.pairwise import load_problem, solve
from hidet_dist.spec import Plan

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hidet_dist.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)


def invoke(*arguments: str) -> Result:
    """A command in this process, which has loaded what is heavy already."""
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def planned():
    """A plan of two matrices, split over two devices, and the report on it."""
    x = hidet.symbol([8, 64])
    fc1, fc2 = hidet_dist.weight("fc1.weight", [64, 256]), hidet_dist.weight("fc2.weight", [256, 64])
    graph = hidet.trace_from(hidet.ops.relu(x @ fc1) @ fc2, [x])
    configurations = {"mesh_shape": [2]}, {"mem_budget": 100_000}
    plan = hidet_dist.make_plan(graph, *configurations)
    return plan, hidet_dist.describe(plan, graph, *configurations, title="two matrices")


def test_the_summary_agrees_with_the_plan():
    plan, report = planned()
    own = summarize(report)
    assert json.loads(json.dumps(own)) == own
    assert own["seconds"] == plan.makespan_seconds
    assert {kind: one["count"] for kind, one in own["collectives"].items()} == plan.collectives()
    memory = own["memory"]
    assert memory["weights_bytes"] == plan.stages[0].weight_bytes_per_device
    parts = ("weights_bytes", "inputs_and_outputs_bytes", "activations_bytes")
    assert sum(memory[part] for part in parts) == memory["peak_bytes"] <= memory["budget_bytes"] == 100_000
    assert own["bound_seconds"] <= own["seconds_without_overlap"]
    assert own["runner_up"]["alone_seconds"] >= own["bound_seconds"]


def test_a_plan_file_with_its_report_is_drawn(tmp_path):
    plan, report = planned()
    plan.save(tmp_path / "plan.json")
    arguments = ("report", str(tmp_path / "plan.json"))
    without = invoke(*arguments, "--html", str(tmp_path / "out.html"))
    assert without.exit_code == 1
    assert len(without.stderr.splitlines()) == 1
    assert "plan.report.json is missing" in without.stderr
    report.save(tmp_path / "plan.report.json")
    assert invoke(*arguments, "--html", str(tmp_path / "out.html")).exit_code == 0
    assert "<title>two matrices</title>" in (tmp_path / "out.html").read_text()
    assert Report.from_json(invoke(*arguments, "--json").stdout) == report
    assert "two matrices on 2" in invoke(*arguments).stdout
    lines = invoke("explain", str(tmp_path / "plan.json"), "--schedule").stdout.splitlines()
    assert lines == plan.explain().schedule
    explained = json.loads(invoke("explain", str(tmp_path / "plan.json"), "--json").stdout)
    assert explained["schedule"] == lines


def onnx_model(path: Path, batch: int | str) -> Path:
    """A product with a matrix of 64 x 256, of inputs ``tokens`` float32[batch, 64]."""
    weight = numpy_helper.from_array(np.ones((64, 256), np.float32), "weight")
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size])
        for name, size in (("tokens", 64), ("scores", 256))
    ]
    node = helper.make_node("MatMul", ["tokens", "weight"], ["scores"])
    graph = helper.make_graph([node], "product", tensors[:1], tensors[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_an_onnx_file_is_planned_at_the_sizes_that_are_given(tmp_path):
    model = str(onnx_model(tmp_path / "product.onnx", "batch"))
    free = invoke("plan", model, "--mesh", "2")
    assert free.exit_code == 1
    assert "--dim batch=1" in free.stderr
    done = invoke("plan", model, "--mesh", "2", "--dim", "batch=8", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["title"], summary["mesh"]) == ("product.onnx", {"axis0": 2})
    assert summary["memory"]["weights_bytes"] in (64 * 256 * 4, 64 * 256 * 2)


def layers_model(path: Path, layers: int) -> Path:
    """Products with matrices of 64 x 64, each with the result of the one before."""
    weights = [numpy_helper.from_array(np.eye(64, dtype=np.float32), f"weight{n}") for n in range(layers)]
    nodes = [helper.make_node("MatMul", [f"x{n}", f"weight{n}"], [f"x{n + 1}"]) for n in range(layers)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 64]) for name in ("x0", f"x{layers}")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_a_pipeline_is_planned_by_its_objective(tmp_path):
    model, out = str(layers_model(tmp_path / "layers.onnx", 4)), tmp_path / "plan.json"
    stale = tmp_path / "plan.report.json"
    stale.write_text("the report on another plan")
    arguments = ("plan", model, "--mesh", "2", "--objective", "throughput", "--stages", "2", "--micro-batches", "2")
    done = invoke(*arguments, "--out", str(out), "--html", str(tmp_path / "out.html"), "--json")
    assert done.exit_code == 0, done.output
    summary, plan = json.loads(done.stdout), Plan.load(out)
    assert plan.pipeline is not None
    assert plan.pipeline.search is not None
    assert [stage["ranks"] for stage in summary["stages"]] == [list(stage.ranks) for stage in plan.pipeline.stages]
    assert [stage["ranks"] for stage in summary["stages"]] == [[0], [1]]
    assert [stage["buffer_bytes"] for stage in summary["stages"]] == [4 * 64 * 4] * 2
    assert summary["micro_batches"] == 2
    assert summary["seconds"] == plan.makespan_seconds
    assert summary["interval_seconds"] == pytest.approx(plan.pipeline.search.seconds)
    assert summary["search"]["objective"] == "throughput"
    assert 0 <= summary["search"]["gap"] <= 0.01
    assert [message["bytes"] for message in summary["messages"]] == [4 * 64 * 4]
    assert not stale.exists()
    for stage in range(2):
        report = Report.from_json(invoke("report", str(out), "--stage", str(stage), "--json").stdout)
        assert len(report.operators) == len(plan.stages[stage].operators)
        assert (tmp_path / f"out.stage{stage}.html").is_file()
    explained = invoke("explain", str(out)).stdout
    assert "lower bound of any pipeline" in explained
    assert explained.count("Schedule: nothing is sharded or sent") == 2
    refused = invoke("report", str(out), "--live")
    assert "--live takes plans of `hidet-dist plan --out` without an --objective" in refused.stderr
    text = invoke(*arguments, "--out", str(out)).stdout
    assert "layers.onnx in 2 stages" in text
    assert "by throughput" in text
    assert " ".join(text.split()).count(", 1.00 KiB for the next micro-batch") == 2
    # A plan of one stage takes the place of the reports on stages.
    assert invoke("plan", model, "--mesh", "2", "--out", str(out)).exit_code == 0
    assert [file.name for file in sorted(tmp_path.glob("*.report.json"))] == ["plan.report.json"]


def test_shares_are_stated_or_searched(tmp_path):
    model, out = str(layers_model(tmp_path / "layers.onnx", 2)), tmp_path / "plan.json"
    done = invoke("plan", model, "--mesh", "2", "--shares", "axis0=3:1", "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["shares"] == {"axis0": [3, 1]}
    assert str(Plan.load(out).stages[0].mesh) == "[axis0=3:1]"
    assert "in shares axis0 = 3:1" in invoke("report", str(out)).stdout
    equal = invoke("plan", model, "--mesh", "2", "--shares", "auto", "--json")  # the machine's devices are equal
    assert json.loads(equal.stdout)["shares"] == {}


def test_an_exported_problem_has_the_plans_optimum(tmp_path):
    model, exported = str(onnx_model(tmp_path / "product.onnx", 8)), tmp_path / "problem.json.gz"
    done = invoke("plan", model, "--mesh", "2", "--budget", "60000", "--export", str(exported), "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    problem = load_problem(exported)
    assert problem.byte_limit == 60_000
    unit = re.fullmatch("costs in (1e-..) s", json.loads(gzip.decompress(exported.read_bytes()))["problem"]["name"])
    found = solve(problem, rounds=20)
    assert found.cost * float(unit[1]) == pytest.approx(summary["seconds_without_overlap"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "nothing", "--mesh", "2"), "There is no model at nothing"),
        (("plan", "nothing", "--mesh", "two"), "'two' is not a mesh"),
        (("plan", "nothing", "--mesh", "2", "--budget", "much"), "'much' is not a size"),
        (("plan", "nothing", "--mesh", "2", "--machine", "dgx"), "Unknown machine 'dgx'"),
        (("plan", "nothing", "--mesh", "99", "--machine", "dgx-h100"), "has 8 devices"),
        (("plan", "nothing", "--mesh", "2", "--dtype", "int8"), "--dtype must be one of"),
        (("plan", "nothing", "--mesh", "2", "--batch", "0"), "--batch must be 1 or more; got 0"),
        (("plan", "nothing", "--mesh", "2", "--objective", "speed"), "--objective must be one of latency, throughput"),
        (("plan", "nothing", "--mesh", "2", "--shares", "2:1"), "'2:1' does not give shares of mesh axes"),
        (("plan", "nothing", "--mesh", "2", "--shares", "gpu=2:1"), "the axis gpu; the mesh has axis0"),
        (("plan", "nothing", "--mesh", "2", "--shares", "axis0=2:1:1"), "2 coordinates but 3 shares"),
        (("plan", "nothing", "--mesh", "2", "--stages", "2"), "--stages is for pipelines: give an --objective"),
        (
            ("plan", "nothing", "--mesh", "2", "--objective", "batch", "--micro-batches", "0"),
            "--micro-batches must be 1",
        ),
        (("plan", "nothing", "--mesh", "2", "--time-limit", "-1"), "--time-limit must be seconds above 0"),
        (("plan", "nothing", "--mesh", "2", "--dim", "batch"), "'batch' is not the size of a dim"),
        (("plan", "nothing", "--mesh", "2", "--dim", "n=1", "--dim", "n=2"), "n has two sizes, 1 and 2"),
        (("plan", "model.pt2", "--mesh", "2"), "hidet_dist.from_torch"),
        (("plan", "model.txt", "--mesh", "2"), "of no known form"),
        (("plan", "empty", "--mesh", "2"), "empty has no config.json"),
        (("plan", "small", "--mesh", "2", "--dim", "n=1"), "takes --batch and --seq"),
        (("plan", "model.onnx", "--mesh", "2", "--seq", "8"), "--seq is for models of transformers"),
        (("plan", "small", "--mesh", "2", "--html", "none/out.html"), "its folder is missing"),
        (("plan", "small", "--mesh", "2", "--out", "empty"), "it is a folder"),
        (("plan", "small", "--mesh", "2", "--export", "none/problem.json"), "its folder is missing"),
        (("build", "small", "--mesh", "2", "--out", "artifacts"), "--random-weights builds with random weights"),
        (("build", "model.onnx", "--mesh", "2", "--out", "artifacts", "--random-weights"), "model.onnx has weights"),
        (("run", "nothing", "--input", "x.npz"), "nothing"),
        (("report", "nothing"), "There is no report of nothing"),
        (("calibrate", "--mesh", "2", "--out", "none/host.json"), "its folder is missing"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(arguments, words, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model.pt2", "model.txt", "model.onnx"):
        (tmp_path / name).write_text("")
    (tmp_path / "empty").mkdir()
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


@pytest.mark.slow
def test_a_configuration_is_planned_without_weights(model, tmp_path):
    out = tmp_path / "plan.json"
    arguments = ("--mesh", "2", "--machine", "dgx-h100", "--batch", "2", "--seq", "8")
    done = run("plan", str(model), *arguments, "--json", "--out", str(out), "--html", str(tmp_path / "out.html"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["title"], summary["mesh"]) == ("small", {"axis0": 2})
    assert hidet_dist.Plan.load(out).makespan_seconds == summary["seconds"]
    assert {family.prefix for family in Report.load(out).families} == {"model.layers"}
    assert (tmp_path / "out.html").exists()
    text = run("plan", str(model), *arguments)
    assert "small on 2 H100-SXM5-80GB" in text.stdout
    for name in ("predicted time", "memory of a device", "runner-up", "distance from the bound"):
        assert name in text.stdout


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_built_and_run(model, tmp_path, dtype):
    out = tmp_path / "artifacts"
    sizes = ("--mesh", "2", "--batch", "2", "--seq", "8", "--dtype", dtype)
    built = run("build", str(model), *sizes, "--random-weights", "--out", str(out))
    assert built.returncode == 0, built.stderr
    ids = np.arange(16).reshape(2, 8)
    np.savez(tmp_path / "x.npz", input_ids=ids)
    wrong = run("run", str(out), "-n", "3", "--input", str(tmp_path / "x.npz"))
    assert wrong.returncode == 1
    assert "run it with -n 2" in wrong.stderr
    files = ("--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz"))
    done = run("run", str(out), "-n", "2", *files, "--profile", str(tmp_path / "trace.json"), "--json")
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["outputs"].values()
    assert (summary["dtype"], summary["shape"]) == ("float32", [2, 1, 48])
    html = run("report", str(out), "--profile", str(tmp_path / "trace.json"), "--html", str(tmp_path / "out.html"))
    assert html.returncode == 0, html.stderr
    assert len(read_traces([tmp_path / "trace.json"])) == 2
    with np.load(tmp_path / "y.npz") as arrays:
        (logits,) = (arrays[name] for name in arrays.files)
    assert logits.shape == (2, 1, 48)
    assert np.isfinite(logits).all()
    for arrays, reason in (
        ({"ids": ids}, "has no array 'input_ids'"),
        ({"input_ids": ids.astype("int32")}, "'input_ids' of the dtype int32; the program takes int64."),
        ({"input_ids": ids[:, :5]}, "'input_ids' of the shape [2, 5]; the program takes [2, 8]."),
    ):
        np.savez(tmp_path / "bad.npz", **arrays)
        bad = run("run", str(out), "--input", str(tmp_path / "bad.npz"))
        assert bad.returncode == 1
        assert reason in bad.stderr
        assert len(bad.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_pipeline_is_run(tmp_path):
    rng = np.random.default_rng(0)
    x, w1, w2 = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 16), (16, 8)))
    symbol = hidet.symbol([4, 8], "float32", "cpu")
    graph = hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(symbol @ hidet.asarray(w1)), hidet.asarray(w2)), [symbol])
    stages = [{"operators": [0, 2], "mesh_shape": [2]}, {"operators": [2, 3], "mesh_shape": [1]}]
    for outputs in ("all", "last"):
        out = tmp_path / outputs
        hidet_dist.auto_parallel(graph, {"mesh_shape": [3]}, {"stages": stages, "outputs": outputs}, out)
        np.savez(tmp_path / "x.npz", x0=x)
        files = ("--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz"))
        trace = ("--profile", str(tmp_path / "trace.json"))
        done = run("run", str(out), "-n", "3", *files, *(trace if outputs == "last" else ()))
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / "y.npz") as arrays:
            (y,) = (arrays[name] for name in arrays.files)
        np.testing.assert_allclose(y, np.maximum(x @ w1, 0) @ w2, rtol=1e-4, atol=1e-4)
    assert {trace.rank for trace in read_traces([tmp_path / "trace.json"])} == {0, 1, 2}
    wrong = run("run", str(out), "-n", "2", *files)
    assert "run it with -n 3" in wrong.stderr


def test_flags_of_the_model_and_of_the_plan(model: Path, tmp_path: Path) -> None:
    """Sizes that a call decides, the class of the model, and specs; the record of the plan's origin has them."""
    out = tmp_path / "plan.json"
    specs = ("--input-spec", "(S0, R)", "--output-spec", "(S0, R, R)", "--pin", "w0=(R, S0)")
    dims = ("--dynamic", "batch:2", "--dynamic", "seq", "--batch", "4", "--seq", "8")
    request = (str(model), "--mesh", "2", *dims, *specs, "--architecture", "LlamaModel", "--out", str(out))
    done = invoke("plan", *request, "--json")
    assert done.exit_code == 0, done.output
    (stage,) = Plan.load(out).stages
    assert [(one.name, one.multiple_of, one.size, one.most) for one in stage.symbols] == [
        ("batch", 2, 4, None),
        ("seq", 1, 8, 64),
    ]
    specs_of = {one.name: str(one.spec) for one in (*stage.inputs, *stage.outputs, *stage.weights)}
    assert specs_of["x0"] == "(S0, R)" and specs_of["w0"] == "(R, S0)" and str(stage.outputs[0].spec) == "(S0, R, R)"
    assert stage.outputs[0].shape[-1] == CONFIG["hidden_size"]  # no logits
    origin = Report.load(out).origin
    assert origin["dynamic"] == "batch:2;seq" and origin["input_spec"] == "(S0, R)"
    assert PlanRequest.of_origin(origin).origin() == origin


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        (("--dynamic", "batch", "--batch", "2"), (2, 1, 48)),
        (("--logits", "all"), (1, 8, 48)),
        (("--logits", "none"), (1, 8, 32)),
    ],
)
def test_logits_of_a_causal_model(flags: tuple[str, ...], shape: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = invoke("plan", str(model), "--mesh", "2", "--seq", "8", *flags, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert Plan.load(out).stages[0].outputs[0].shape == shape


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--logits", "first"), "--logits must be one of last, all, none; got 'first'"),
        (("--dynamic", "tokens"), "'tokens' is not a symbolic dim"),
        (("--dynamic", "seq", "--dynamic", "seq:2"), "'seq:2' is not a symbolic dim"),
        (("--pin", "w0"), "'w0' is not a pin"),
        (("--input-spec", "(S7"), "--input-spec: Not a tensor sharding spec: '(S7'"),
        (("--target", "tpu"), "--target must be one of cpu, cuda; got 'tpu'"),
        (("--precision", "int4"), "--precision must be one of"),
    ],
)
def test_flags_that_say_nothing_are_refused_before_the_model_is_read(
    model: Path, flags: tuple[str, ...], says: str
) -> None:
    (model / "config.json").write_text("{")
    done = invoke("plan", str(model), "--mesh", "2", *flags)
    assert done.exit_code == 1
    assert says in done.stderr


def test_a_search_that_is_interrupted_ends_as_signals_do(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit status of a shell for SIGINT, and no traceback."""
    searching = []

    def optimize(*_: object) -> None:
        searching.append(True)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(one_graph, "optimize", optimize)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with pytest.raises(SystemExit) as ended:
            app(["plan", str(model), "--mesh", "2", "--seq", "8"], prog_name="hidet-dist")
    finally:
        signal.signal(signal.SIGINT, before)
    assert searching
    assert ended.value.code == 128 + signal.SIGINT
    assert "Traceback" not in "".join(capfd.readouterr())
