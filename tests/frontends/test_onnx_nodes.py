"""The node tests of the ONNX project: what has a lowering computes what they say, or is refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases

import hidet_dist
from hidet_dist.errors import HidetDistError
from hidet_dist.frontends.onnx.model import NEWEST_OPSET, OLDEST_OPSET
from hidet_dist.frontends.onnx.nodes import supported
from hidet_dist.soundness.plans import evaluate_graph

# Inputs that must be known while a model is traced; the tests give them when they call it.
KNOWN = {
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Split", "Expand", "Tile", "TopK", "CumSum", "Trilu"), (1,)),
    **dict.fromkeys(("Pad", "Resize"), (1, 2, 3)),
    **dict.fromkeys(("OneHot", "Dropout"), (1, 2)),
    **dict.fromkeys(("LSTM", "GRU"), (4,)),
    "Slice": (1, 2, 3, 4),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "If": (0,),
}
# Tolerances of element types: what is compared is computed in double precision.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}


def array(value: Any) -> np.ndarray:
    """A value of a test, some of which are in ONNX's own form."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def prepared(case: Any) -> tuple[onnx.ModelProto, list[np.ndarray]] | None:
    """A test's model of an opset that is read, with what must be known in it; None for one that is not for this."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    (entry,) = [own for own in model.opset_import if own.domain == ""] or [None]
    if entry is None or entry.version < OLDEST_OPSET or len(model.graph.node) != 1:
        return None
    (node,) = model.graph.node
    if node.op_type not in supported() or not case.data_sets:
        return None
    entry.version = min(entry.version, NEWEST_OPSET)
    given = dict(zip([own.name for own in model.graph.input], case.data_sets[0][0], strict=False))
    places = (1,) if node.op_type.startswith("Reduce") else KNOWN.get(node.op_type, ())
    known = {node.input[place] for place in places if place < len(node.input) and node.input[place]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array(given[name]), name) for name in known)
    inputs = [own for own in model.graph.input if own.name not in known]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model, [array(given[own.name]) for own in inputs]


def wrong(graph: Any, inputs: list[np.ndarray], outputs: list[Any]) -> bool:
    wide = [x.astype(np.float64) if x.dtype.kind not in "biu" else x for x in inputs]
    for own, symbol, given in zip(evaluate_graph(graph, wide), graph.outputs, outputs, strict=True):
        want = array(given)
        if own.shape != want.shape or symbol.dtype.name != want.dtype.name:
            return True
        tolerance = TOLERANCE.get(want.dtype.name, 1e-3)
        number = want.astype(np.float64)
        if not np.allclose(own.astype(np.float64), number, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
            return True
    return False


@pytest.mark.slow
def test_the_node_tests_of_the_onnx_project(tmp_path):
    counts: Counter[str] = Counter()
    failures = []
    for case in collect_testcases(None):
        found = prepared(case)
        if found is None:
            continue
        model, inputs = found
        path = Path(tmp_path) / "model.onnx"
        onnx.save(model, path)
        try:
            graph = hidet_dist.from_onnx(path)
        except HidetDistError:
            counts["refused"] += 1
            continue
        if wrong(graph, inputs, case.data_sets[0][1]):
            failures.append(case.name)
        counts["right" if case.name not in failures else "wrong"] += 1
    assert failures == []
    assert counts["right"] >= 600, counts
