"""Builds a small language model over pools of rows; its steps and transformers' logits in float64 lie beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import hidet_dist
from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle
from hidet_dist.testing.rounding import rounded_weight
from hidet_dist.weights.panels import GROUPS

EXPERTS = "experts"
PRECISIONS = ("float32", "float16", "int8", "int4", EXPERTS)
"""Dtypes of the model, or precisions of the weights of its products in half precision; or experts in half precision."""
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 2e-2, "int4": 2e-2, EXPERTS: 2e-2}
"""How far logits may be from the exact ones, relative to the largest: half precision rounds each tensor."""
PAGE, PAGES, OF_SEQUENCE = 16, 32, 8
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 200, "head_dim": 16}
# A long prompt; a second one's first chunk beside decoding; its rest; decoding of both, four times the same size.
STEPS = ({0: 70}, {0: 1, 1: 9}, {1: 20}, *[{0: 1, 1: 1}] * 4)


def model(precision: str) -> Any:
    """A random LLaMA, or Mixtral, whose heads share keys and values in groups of four."""
    torch.manual_seed(0)
    made_by = MixtralConfig if precision == EXPERTS else LlamaConfig
    config = made_by(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False, **SIZES)
    config._attn_implementation = config._experts_implementation = "eager"  # PyTorch's own have no float64
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in made.named_parameters():
            x.normal_(0, 0.1).add_(1.0 if "norm" in name else 0.0)
    return made


def steps(tokens: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The inputs of each step: the next tokens of the sequences, whose pages lie anywhere in the pools."""
    pages = np.random.default_rng(0).permutation(PAGES).reshape(-1, OF_SEQUENCE)
    done, made = [0] * len(tokens), []
    for counts in STEPS:
        rows, positions = [], []
        for row, (number, count) in enumerate(counts.items()):
            positions += range(done[number], done[number] + count)
            rows += [row] * count
            done[number] += count
        own = [list(counts)[row] for row in rows]
        at = np.array(positions)
        ends = np.cumsum(list(counts.values())) - 1
        made.append(
            {
                "tokens": np.array([tokens[n][at] for n, at in zip(own, positions, strict=True)]),
                "positions": np.array(positions),
                "slots": np.array(
                    [pages[n, at // PAGE] * PAGE + at % PAGE for n, at in zip(own, positions, strict=True)]
                ),
                "sequences": np.array(rows),
                "lengths": at + 1,
                "table": pages[list(counts)],
                "wanted": ends,
            }
        )
    return made


def build(precision: str, out: Path, target: dict[str, Any]) -> None:
    """Build, and say for what."""
    whole = model(precision)
    dtype = torch.float32 if precision == "float32" else torch.float16
    config = copy.deepcopy(whole.config)
    prepare(config)
    module = type(whole)(config).eval().to(dtype)
    module.load_state_dict(whole.state_dict())
    settle(module)
    step = RaggedModel(module, PAGES * PAGE, PAGE, device="meta")
    graph = hidet_dist.from_torch(step, step.inputs(), dynamic_shapes())
    options = {**target, "symbols": {"tokens": 2, "sequences": 2, "pages": OF_SEQUENCE, "wanted": 2}}
    whole = whole.to(dtype).double()
    if precision in ("int8", "int4"):
        options["weights"] = {"precision": precision, "group": GROUPS[0]}
        for part in whole.modules():
            if isinstance(part, torch.nn.Linear):
                part.weight.data = rounded_weight(part.weight.data, precision, GROUPS[0])
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, options, out)
    counts = [sum(step.get(n, 0) for step in STEPS) for n in range(2)]
    tokens = [np.random.default_rng(n).integers(0, SIZES["vocab_size"], count) for n, count in enumerate(counts)]
    with torch.inference_mode():
        exact = [whole(input_ids=torch.from_numpy(x)[None]).logits[0].numpy() for x in tokens]
    data, done = {}, [0, 0]
    for number, (step_inputs, counts_of) in enumerate(zip(steps(tokens), STEPS, strict=True)):
        data.update({f"{number}.{name}": x.astype(np.int64) for name, x in step_inputs.items()})
        for n, count in counts_of.items():
            done[n] += count
        data[f"{number}.expected"] = np.stack([exact[n][done[n] - 1] for n in counts_of])
    np.savez(f"{out}.npz", **data, tolerance=TOLERANCES[precision])
    print(f"{len(result.plan.stages[0].states)} states, built in {result.compile_seconds:.1f} s")
