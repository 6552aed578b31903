"""Attention over a cache as ONNX Runtime GenAI exports it, sharded, beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from tests.frontends.test_onnx_fused import check, floats, fused, saved

import hidet_dist
from hidet_dist.errors import TraceError, UnsupportedModelError

HEADS, GROUPS, SIZE, ROOM = 4, 2, 16, 8
INPUTS = (
    *(
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
    ),
    *("position_ids", "attention_bias", "head_sink", "k_scale", "v_scale"),
)
OUTPUTS = ("y", "present_key", "present_value")


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    model.ir_version = 10
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def attention(
    path: Path,
    lengths: list[int],
    steps: int,
    total: int,
    packed: bool = False,
    past: bool = True,
    given: tuple[str, ...] = (),
    outputs: tuple[str, ...] = OUTPUTS,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Save a model of one node, of sequences that have ``lengths`` tokens with the new ones; return it and inputs."""
    batch = len(lengths)
    inputs = {"query": floats(batch, steps, (HEADS + 2 * GROUPS * packed) * SIZE)}
    if not packed:
        inputs |= {name: floats(batch, steps, GROUPS * SIZE) for name in ("key", "value")}
    if past:
        inputs |= {name: floats(batch, GROUPS, ROOM, SIZE) for name in ("past_key", "past_value")}
    inputs["seqlens_k"] = np.array(lengths, np.int32) - 1
    weights = {"total_sequence_length": np.array(total, np.int32)}
    if attributes.get("do_rotary"):
        weights |= {name: floats(2 * ROOM, SIZE // 2) for name in ("cos_cache", "sin_cache")}
    more = {
        "position_ids": np.arange(batch * steps).reshape(batch, steps) + 2,
        "attention_bias": floats(1, HEADS, steps, total if "attention_bias" in given else 0),
        "head_sink": floats(HEADS),
        "k_scale": floats(1),
        "v_scale": floats(1),
    }
    inputs |= {name: more[name] for name in given}
    names = [name if name in {**inputs, **weights} else "" for name in INPUTS]
    node = fused("GroupQueryAttention", names, list(outputs), num_heads=HEADS, kv_num_heads=GROUPS, **attributes)
    return saved(path, [node], inputs, weights, [name for name in outputs if name]), inputs


PROMPT: dict[str, Any] = {"lengths": [4, 6], "steps": 6, "total": 6}
TOKEN: dict[str, Any] = {"lengths": [5, 7], "steps": 1, "total": 7}
LONGER: dict[str, Any] = {"lengths": [6, 9], "steps": 1, "total": ROOM + 1}
CHUNK: dict[str, Any] = {"lengths": [7], "steps": 3, "total": 7}


@pytest.mark.parametrize(
    "case",
    [
        {**PROMPT, "past": False, "packed": True, "do_rotary": 1},
        {**PROMPT, "local_window_size": 3, "do_rotary": 1, "given": ("position_ids",)},
        {**TOKEN, "do_rotary": 1, "rotary_interleaved": 1, "softcap": 2.0, "local_window_size": 3},
        {**TOKEN, "packed": True, "do_rotary": 1, "given": ("position_ids",), "smooth_softmax": 1},
        {**LONGER, "scale": 0.3, "do_rotary": 1, "given": ("head_sink",)},
        {**CHUNK, "given": ("attention_bias", "head_sink"), "local_window_size": 2},
        {**CHUNK, "causal": 0},
    ],
    ids=lambda case: "-".join(f"{name}={value}" for name, value in case.items()),
)
def test_attention_over_a_cache(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / "model.onnx"
    model, inputs = attention(path, **case)
    check(path, inputs, by_onnxruntime(model, inputs))


def test_a_layer_whose_lengths_are_those_of_a_mask(tmp_path: Path) -> None:
    """What GenAI's exports compute: lengths are sums of the mask, and the greatest length is its width."""
    width, total, path = HEADS * SIZE, ROOM + 1, tmp_path / "model.onnx"
    weights = {
        "gamma": floats(width),
        "gamma2": floats(width),
        "qkv": floats(width, (HEADS + 2 * GROUPS) * SIZE) / 8,
        "out": floats(width, width) / 8,
        "cos": floats(2 * ROOM, SIZE // 2),
        "sin": floats(2 * ROOM, SIZE // 2),
        "one": np.array([1], np.int64),
        "last": np.array(1, np.int64),
    }
    nodes = [
        helper.make_node("ReduceSum", ["mask", "one"], ["counts"], keepdims=0),
        helper.make_node("Sub", ["counts", "one"], ["ends"]),
        helper.make_node("Cast", ["ends"], ["lengths"], to=onnx.TensorProto.INT32),
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["wide"], axis=0),
        helper.make_node("Cast", ["wide"], ["total"], to=onnx.TensorProto.INT32),
        helper.make_node("SimplifiedLayerNormalization", ["x", "gamma"], ["normal"], axis=-1, epsilon=1e-5),
        helper.make_node("MatMul", ["normal", "qkv"], ["joined"]),
        fused(
            "GroupQueryAttention",
            ["joined", "", "", "past_key", "past_value", "lengths", "total", "cos", "sin"],
            ["mixed", "present_key", "present_value"],
            num_heads=HEADS,
            kv_num_heads=GROUPS,
            do_rotary=1,
        ),
        helper.make_node("MatMul", ["mixed", "out"], ["back"]),
        fused("SkipSimplifiedLayerNormalization", ["x", "back", "gamma2"], ["y", "", "", "z"], epsilon=1e-5),
    ]
    inputs = {
        "x": floats(2, 1, width),
        "mask": (np.arange(total) < np.array([[6], [9]])).astype(np.int64),
        "past_key": floats(2, GROUPS, ROOM, SIZE),
        "past_value": floats(2, GROUPS, ROOM, SIZE),
    }
    model = saved(path, nodes, inputs, weights, ["y", "z", "present_key", "present_value"])
    check(path, inputs, by_onnxruntime(model, inputs))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({**TOKEN, "given": ("k_scale", "v_scale")}, "quantized cache"),
        ({**TOKEN, "sliding_window_cache": 1, "local_window_size": 3}, "sliding_window_cache"),
        ({**TOKEN, "outputs": (*OUTPUTS, "scores"), "qk_output": 1}, "output_qk"),
        ({**TOKEN, "total": 0}, "total_sequence_length is 0"),
        ({**TOKEN, "past": False}, "a cache of 0"),
        ({**TOKEN, "total": 2**31 - 1}, "the tokens of a sequence would be 2147483647"),
        ({**TOKEN, "local_window_size": 0}, "local_window_size is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_named(tmp_path: Path, case: dict[str, Any], message: str) -> None:
    attention(tmp_path / "model.onnx", **case)
    with pytest.raises((TraceError, UnsupportedModelError), match=message):
        hidet_dist.from_onnx(tmp_path / "model.onnx")
