"""Layers as ONNX Runtime's optimizer writes them, sharded, beside PyTorch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch.nn import functional

import hidet_dist
from hidet_dist.errors import InfeasibleError, TraceError
from hidet_dist.soundness.plans import evaluate_program

RNG = np.random.default_rng(0)
HIDDEN, HEADS, LENGTH, BATCH = 16, 2, 6, 2
INT32, FLOAT = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def fused(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, domain="com.microsoft", **attributes)


def saved(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    outputs: list[str],
    opset: int = 17,
) -> onnx.ModelProto:
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    graph = helper.make_graph(
        nodes,
        "fused",
        declared,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains)
    onnx.save(model, path)
    return model


def sharded(path: Path, inputs: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
    """The outputs of two ranks that hold as little as they can."""
    graph = hidet_dist.from_onnx(path)
    with pytest.raises(InfeasibleError) as refused:
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": 1})
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": refused.value.least_budget})
    program = hidet_dist.partition(graph, plan)
    wide = [value.astype(np.float64) if value.dtype.kind == "f" else value for value in inputs.values()]
    found = evaluate_program(program, wide)
    results = []
    for rank, outputs in enumerate(found):
        coordinate = program.mesh.coordinate(rank)
        results.append(
            [
                (y, tensor.spec.slices(tensor.shape, program.mesh, coordinate))
                for y, tensor in zip(outputs, plan.stages[0].outputs, strict=True)
            ]
        )
    return results


def check(path: Path, inputs: dict[str, np.ndarray], wanted: list[Any]) -> None:
    for rank in sharded(path, inputs):
        for (y, piece), want in zip(rank, wanted, strict=True):
            np.testing.assert_allclose(y, np.asarray(want)[piece], rtol=1e-4, atol=1e-4)


def layer_norm(x: torch.Tensor, weights: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    return functional.layer_norm(x, [HIDDEN], weights[f"gamma{number}"], weights[f"beta{number}"], 1e-12)


def test_an_encoder_layer(tmp_path):
    weights = {
        "words": floats(20, HIDDEN),
        "places": floats(8, HIDDEN),
        "kinds": floats(2, HIDDEN),
        "qkv": floats(HIDDEN, 3 * HIDDEN) / 4,
        "qkv_bias": floats(3 * HIDDEN),
        "wide": floats(HIDDEN, 4 * HIDDEN) / 4,
        "wide_bias": floats(4 * HIDDEN),
        "narrow": floats(4 * HIDDEN, HIDDEN) / 8,
        "narrow_bias": floats(HIDDEN),
        **{f"{kind}{n}": floats(HIDDEN) for kind in ("gamma", "beta") for n in range(3)},
    }
    nodes = [
        fused(
            "EmbedLayerNormalization",
            ["ids", "segments", "words", "places", "kinds", "gamma0", "beta0", "mask"],
            ["embedded", "lengths"],
        ),
        fused("Attention", ["embedded", "qkv", "qkv_bias", "lengths"], ["mixed"], num_heads=HEADS),
        fused("SkipLayerNormalization", ["mixed", "embedded", "gamma1", "beta1"], ["middle"]),
        fused("FusedMatMul", ["middle", "wide"], ["product"], alpha=0.5),
        fused("BiasGelu", ["product", "wide_bias"], ["active"]),
        helper.make_node("MatMul", ["active", "narrow"], ["back"]),
        fused("SkipLayerNormalization", ["back", "middle", "gamma2", "beta2", "narrow_bias"], ["y"]),
    ]
    inputs = {
        "ids": RNG.integers(0, 20, (BATCH, LENGTH)).astype(np.int32),
        "segments": RNG.integers(0, 2, (BATCH, LENGTH)).astype(np.int32),
        "mask": (np.arange(LENGTH) < np.array([[4], [6]])).astype(np.int32),
    }
    path = tmp_path / "model.onnx"
    saved(path, nodes, inputs, weights, ["y"])
    w = {name: torch.from_numpy(value) for name, value in weights.items()}
    x = w["words"][inputs["ids"]] + w["places"][:LENGTH] + w["kinds"][inputs["segments"]]
    x = layer_norm(x, w, 0)
    query, key, value = (
        part.reshape(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in (x @ w["qkv"] + w["qkv_bias"]).chunk(3, -1)
    )
    hidden = -10000.0 * (1 - torch.from_numpy(inputs["mask"]).float())[:, None, None, :]
    mixed = functional.scaled_dot_product_attention(query, key, value, hidden)
    middle = layer_norm(mixed.transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN) + x, w, 1)
    active = functional.gelu(0.5 * middle @ w["wide"] + w["wide_bias"])
    check(path, inputs, [layer_norm(active @ w["narrow"] + middle + w["narrow_bias"], w, 2)])


def test_a_decoder_layer_with_a_cache(tmp_path):
    past, size = 3, HIDDEN // HEADS
    weights = {
        "gamma0": floats(HIDDEN),
        "beta0": floats(HIDDEN),
        "qkv": floats(HIDDEN, 3 * HIDDEN) / 4,
        "qkv_bias": floats(3 * HIDDEN),
        "wide_bias": floats(HIDDEN),
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gamma0", "beta0"], ["normal"], epsilon=1e-12),
        fused(
            "Attention",
            ["normal", "qkv", "qkv_bias", "", "past"],
            ["mixed", "present"],
            num_heads=HEADS,
            unidirectional=1,
        ),
        fused("FastGelu", ["mixed", "wide_bias"], ["y"]),
    ]
    inputs = {"x": floats(BATCH, LENGTH, HIDDEN), "past": floats(2, BATCH, HEADS, past, size)}
    path = tmp_path / "model.onnx"
    # Before opset 17 the layer norm is ONNX Runtime's, too, though in the domain of ONNX.
    saved(path, nodes, inputs, weights, ["y", "present"], opset=14)
    w = {name: torch.from_numpy(value) for name, value in weights.items()}
    qkv = layer_norm(torch.from_numpy(inputs["x"]), w, 0) @ w["qkv"] + w["qkv_bias"]
    query, key, value = (p.reshape(BATCH, LENGTH, HEADS, size).transpose(1, 2) for p in qkv.chunk(3, -1))
    old = torch.from_numpy(inputs["past"])
    key, value = torch.cat([old[0], key], 2), torch.cat([old[1], value], 2)
    allowed = torch.ones(LENGTH, past + LENGTH, dtype=torch.bool).tril(past)
    mixed = functional.scaled_dot_product_attention(query, key, value, allowed)
    y = functional.gelu(mixed.transpose(1, 2).reshape(BATCH, LENGTH, HIDDEN) + w["wide_bias"], approximate="tanh")
    check(path, inputs, [y, torch.stack([key, value])])


def test_attention_of_the_standard(tmp_path):
    """Rotary embeddings, grouped heads, a cache that is written in place, and what its padding hides."""
    width, slots = 8, 7
    nodes = [
        helper.make_node("RotaryEmbedding", ["q", "cos", "sin", "places"], ["turned"]),
        helper.make_node("TensorScatter", ["keys", "k", "start"], ["all_keys"], axis=2),
        helper.make_node("TensorScatter", ["values", "v", "start"], ["all_values"], axis=2),
        helper.make_node(
            "Attention",
            ["turned", "all_keys", "all_values", "", "", "", "counts"],
            ["mixed"],
            is_causal=1,
            softcap=5.0,
        ),
        helper.make_node("RMSNormalization", ["mixed", "gamma"], ["y"]),
    ]
    inputs = {
        "q": floats(BATCH, 4, 2, width),
        "k": floats(BATCH, 2, 2, width),
        "v": floats(BATCH, 2, 2, width),
        "keys": floats(BATCH, 2, slots, width),
        "values": floats(BATCH, 2, slots, width),
        "start": np.array([1, 4]),
        "counts": np.array([3, 6]),
        "places": np.array([[1, 2], [4, 5]]),
    }
    weights = {"cos": floats(slots, width // 2), "sin": floats(slots, width // 2), "gamma": floats(width)}
    path = tmp_path / "model.onnx"
    model = saved(path, nodes, inputs, weights, ["y"], opset=24)
    check(path, inputs, ReferenceEvaluator(model).run(None, inputs))


@pytest.mark.parametrize(
    ("activation", "given", "want"),
    [
        ("Relu", [0.5], torch.relu),
        ("Sigmoid", [0.5, 0.25], torch.sigmoid),
        ("LeakyRelu", [0.3, 0.7], lambda x: functional.leaky_relu(x, 0.3)),
        ("HardSigmoid", [0.3, 0.25], lambda x: (0.3 * x + 0.25).clamp(0, 1)),
        ("LeakyRelu", [], None),
        ("Clip", [0.5], None),
    ],
)
def test_activations_take_their_own_parameters(tmp_path, activation, given, want):
    x, w, path = floats(4, 8), floats(8, 6), tmp_path / "model.onnx"
    parameters = dict(zip(("activation_alpha", "activation_beta"), given, strict=False))
    saved(path, [fused("FusedGemm", ["x", "w"], ["y"], activation=activation, **parameters)], {"x": x}, {"w": w}, ["y"])
    if want is None:
        with pytest.raises(TraceError, match=f"{activation} has {len(given)} of"):
            hidet_dist.from_onnx(path)
        return
    check(path, {"x": x}, [want(torch.from_numpy(x @ w))])
