"""Builds a model for this machine's GPU: ``build.py MODEL PRECISION RANKS VARIANT ARCH OUT``.

Beside the artifacts it leaves the inputs, what PyTorch's model of the same weights answers in float64 on the CPU, and
how far a right answer may be from that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import torch
from hidet.graph import FlowGraph
from hidet.testing.models.resnet import BasicBlock, ResNet
from safetensors.numpy import load_file, save_file

from hidet_dist import auto_parallel
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.targets import TARGETS
from hidet_dist.testing import bert, shapes, torch_models
from hidet_dist.testing.minilm import minilm_dir
from hidet_dist.testing.rounding import tolerance
from hidet_dist.view import GraphView
from hidet_dist.weights import as_weights

MINILM = "HIDET_DIST_MINILM"
"""The environment variable with the folder of all-MiniLM-L6-v2, where its package is not installed."""
SLACK = 1.3  # of an even share of the weights: what a rank may hold of them, so that they are split
STAGES, MICRO_BATCHES = 2, 2  # of the variant with stages
_MASKED = -1e9


@dataclass(frozen=True)
class Case:
    """A float32 graph, the safetensors file with its weights if it has them by name, inputs, and PyTorch's model."""

    graph: FlowGraph
    weights: Path | None
    inputs: list[np.ndarray]
    model: Callable[..., torch.Tensor]  # of the inputs as tensors, and of a dtype
    remark: str = ""


def minilm(_: Path) -> Case:
    """all-MiniLM-L6-v2, or random weights of its shapes where it is not there."""
    from transformers import BertConfig, BertModel

    batch, seq = 4, 32
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30000, (batch, seq)).astype(np.int32)
    mask = (np.arange(seq) < np.array([[seq], [9], [20], [1]])).astype(np.float32)
    try:
        folder = Path(os.environ[MINILM]) if MINILM in os.environ else minilm_dir()
    except ModuleNotFoundError:
        config = bert.BertConfig(30522, 384, 6, 12, 1536, 512)
        weights = bert.random_weights(config, 0)
        own = bert.BertEncoder(config, weights)
        peer = BertModel(BertConfig(**vars(config)), add_pooling_layer=False)
        peer.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()}, strict=False)
        remark = "random weights, as all-MiniLM-L6-v2 is not installed"
    else:
        config = bert.BertConfig.from_json(folder / "config.json")
        weights = {name: x.astype(np.float32) for name, x in load_file(folder / "model.safetensors").items()}
        own = bert.BertEncoder(config, weights)  # in float32, also where they were packed in half precision
        peer = BertModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        remark = "all-MiniLM-L6-v2"
    peer = peer.eval()

    def embed(ids: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        hidden = peer.to(dtype)(input_ids=ids.long(), attention_mask=mask.long()).last_hidden_state
        mean = (hidden * mask[:, :, None].to(dtype)).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=1)

    return Case(bert.trace(own, batch, seq), None, [ids, mask], embed, remark)


def language_model(folder: Path, config: shapes.GPTConfig | shapes.LlamaConfig) -> Case:
    """A GPT or LLaMA with random weights."""
    is_gpt = isinstance(config, shapes.GPTConfig)
    graph = shapes.gpt(config) if is_gpt else shapes.llama(config)
    weights = folder.with_suffix(".weights.safetensors")
    save_file(shapes.random_weights(graph), weights)
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (config.batch, config.sequence)).astype(np.int32)
    mask = np.triu(np.full((1, 1, config.sequence, config.sequence), _MASKED, np.float32), 1)
    peer = (torch_models.GPT(config) if is_gpt else torch_models.Llama(config)).load(weights).eval()

    def logits(ids: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return peer.to(dtype)(ids, mask)

    return Case(graph, weights, [ids, mask], logits)


def resnet18(folder: Path, batch: int = 4, pixels: int = 64) -> Case:
    """ResNet-18 with random weights."""
    module = ResNet(BasicBlock, [2, 2, 2, 2])
    as_weights(module)
    x = hidet.symbol([batch, 3, pixels, pixels], "float32", "cpu")
    graph = hidet.trace_from(module(x), [x])
    weights = folder.with_suffix(".weights.safetensors")
    save_file(shapes.random_weights(graph), weights)
    image = np.random.default_rng(0).standard_normal((batch, 3, pixels, pixels), np.float32)
    peer = torch_models.resnet18().load(weights).eval()

    def logits(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return peer.to(dtype)(image.to(dtype))

    return Case(graph, weights, [image], logits)


CASES: dict[str, Callable[[Path], Case]] = {
    "minilm": minilm,
    "gpt2": lambda folder: language_model(folder, shapes.GPTConfig(4, 512, 8, 1000, 2, 64, "float32")),
    "llama": lambda folder: language_model(folder, shapes.LlamaConfig(4, 512, 8, 4, 1024, 1000, 2, 64, "float32")),
    "resnet18": resnet18,
}


def reference(case: Case, precision: str) -> dict[str, Any]:
    """PyTorch's answer, and what is taken for right: see :mod:`hidet_dist.testing.rounding`.

    In half precision the root mean square of the error is also compared with that of PyTorch's model in the same
    precision: a program that rounds elsewhere, up to four times as often, has up to twice its error.
    """
    inputs = [torch.from_numpy(x) for x in case.inputs]
    with torch.inference_mode():
        exact = case.model(*inputs, torch.float64)  # first: its weights are rounded after that
        half = None if precision == "float32" else case.model(*inputs, getattr(torch, precision)).double()
    rms = np.inf if half is None else float((half - exact).square().mean().sqrt())
    return {"expected": exact.numpy(), "tolerance": tolerance(case.graph, precision), "rms": 2 * rms}


def build(model: str, precision: str, ranks: int, variant: str, arch: str, out: Path, target: dict[str, Any]) -> None:
    """Build, and say what is communicated."""
    case = CASES[model](out)
    np.savez(f"{out}.npz", *case.inputs, **reference(case, precision))
    graph = normalize(case.graph if precision == "float32" else in_precision(case.graph, precision).graph)
    config = {**target, "weights": case.weights}
    if variant == "stages":
        config |= {"objective": "throughput", "stages": STAGES, "micro_batches": MICRO_BATCHES}
    elif ranks > 1:  # so that it is split
        stage = search(graph, builtin(TARGETS["cuda"].machines[arch], DeviceMesh((1,)))).plan.stages[0]
        weights = stage.weight_bytes_per_device
        config["mem_budget"] = int(weights * SLACK / ranks) + max(live_bytes(GraphView(graph), stage)) - weights
    if variant == "graph":
        config["cuda"] = {"cuda_graph": True}
    if variant == "candidates":
        config["cuda"] = {"space": 1, "cublas": True}
    result = auto_parallel(graph, {"mesh_shape": [ranks]}, config, out)
    remark = f"; {case.remark}" if case.remark else ""
    pipeline = result.plan.pipeline
    if pipeline is not None:
        remark = f"; {len(pipeline.stages)} stages, {len(pipeline.boundaries)} tensors cross{remark}"
    print(f"{len(result.communications)} collectives, built in {result.compile_seconds:.1f} s{remark}")


def main(model: str, precision: str, ranks: str, variant: str, arch: str, out: str) -> None:
    target: dict[str, Any] = {"target": "cuda", "arch": arch}
    if model == "decoder":
        import build_decoder  # and with it PyTorch's models, which others do without

        build_decoder.build(precision, Path(out), {**target, "cuda": {"cuda_graph": variant == "graph"}})
    else:
        build(model, precision, int(ranks), variant, arch, Path(out), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
