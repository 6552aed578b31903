"""Layers of experts over real processes: split by experts, with the dispatch of tokens, against the oracle."""

from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist  # noqa: F401
from hidet_dist.normalize import normalize
from hidet_dist.normalize.expert_layers import join_expert_layers
from hidet_dist.operators.expert_layers import ExpertLayerOp
from hidet_dist.rules.rule import derive
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh, OpSpecPattern
from hidet_dist.testing.expert_layers import expert_layer

from .conftest import launch


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_exchange_the_tokens_of_their_experts(tmp_path, ranks):
    """Every choice that dispatches tokens, and one that splits experts with padding; odd numbers of all else."""
    expected = {}
    for name, case in {"gated": {}, "biased": {"biased": True}, "one": {"choices": 1, "transposed": True}}.items():
        graph, inputs = expert_layer(tokens=6 * ranks, experts=5, **case)
        place, op = next(
            (n, op) for n, op in enumerate(join_expert_layers(normalize(graph)).nodes) if isinstance(op, ExpertLayerOp)
        )
        choices = derive(op).choices(DeviceMesh((ranks,)))
        dispatched = [choice.spec for choice in choices if choice.spec.dispatch is not None]
        split = [choice.spec for choice in choices if choice.spec.dispatch is None and "(S0, R, R)" in str(choice.spec)]
        for spec in (*dispatched, split[0]):
            key = f"{name}{len(expected)}"
            config = {"pins": {f"op:{place}": str(OpSpecPattern.of(spec))}, "experts": "joined"}
            made = hidet.distributed.auto_parallel(graph, {"mesh_shape": [ranks]}, config, tmp_path / key)
            assert made.plan.stages[0].operators[place].spec.dispatch == spec.dispatch
            np.savez(
                tmp_path / f"{key}.inputs.npz",
                *(x.astype("float32" if x.dtype.kind == "f" else x.dtype) for x in inputs),
            )
            expected[key] = evaluate_graph(graph, inputs)
    assert len(expected) == 6
    done = launch(ranks, Path(__file__).with_name("serve_many.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    for name, wholes in expected.items():
        for rank in range(ranks):
            with np.load(tmp_path / f"{name}.rank{rank}.npz") as results:
                for key, whole in zip(results.files, wholes, strict=True):
                    np.testing.assert_allclose(results[key], whole, atol=1e-4, err_msg=f"{name}, rank {rank}")
