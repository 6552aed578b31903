"""A model whose vocabulary and inner width do not divide, sharded along both, over two real processes."""

import numpy as np

from hidet_dist.compile import compile_program
from hidet_dist.export.write import BuiltProgram, write_artifacts
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.padding import MaskPaddingOp
from hidet_dist.search import search
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh

from .conftest import serve

# The table (13 rows) by its rows, for the lookup and for the head, which reads it transposed; the inner width (11) by
# columns, then by rows.
PINS = {
    "w0": "(S0, R)",
    "op:Take": "(S0, R), ? -> ?",
    "op:Matmul#0": "?, (R, S0) -> ?",
    "op:Exp": "(R, R, S0) -> ?",
    "op:Matmul#1": "?, (S0, R) -> ?",
    "op:Matmul#2": "?, (S0, R) -> (R, R, S0)",
}


def test_two_processes_share_a_vocabulary_that_does_not_divide(tmp_path):
    graph, out = normalize(GRAPHS["uneven"](np.random.default_rng(0))), tmp_path / "artifacts"
    mesh = DeviceMesh((2,))
    plan = search(graph, builtin("cpu", mesh), pins=PINS).plan
    assert "w0" in [w.name for w in plan.stages[0].weights if w.spec.is_padded(w.shape, mesh)]
    program = partition_graph(graph, plan.stages[0])
    out.mkdir()
    write_artifacts(out, {"main": BuiltProgram(plan, [(program, compile_program(program))])})
    assert sum(isinstance(node, MaskPaddingOp) for node in program.graph.nodes) == 1
    ids = np.array([[0, 12, 6, 7], [-1, -13, 3, 11]])
    whole = evaluate_graph(graph, [ids])
    for outputs in serve(2, out, [ids], tmp_path):
        np.testing.assert_allclose(outputs[0], whole[0], rtol=1e-5, atol=1e-5)
