"""The models in PyTorch, and how an expert would run each in two processes.

All take and give what the graphs of :mod:`cases` do. Weights go by the names that those graphs have.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from benchmarks.serving import modules
from hidet_dist.runtime.processor import features
from hidet_dist.testing import sizes, torch_models


class SentenceEncoder(nn.Module):
    """transformers' BERT, the mean of the tokens that are not padding, and division by the Euclidean norm."""

    def __init__(self, folder: Path):
        super().__init__()
        from transformers import AutoModel

        self.bert = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return functional.normalize(mean, dim=1)


def split_encoder(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron-LM's plan: matrices by columns, then by rows."""
    layers: Any = model.get_submodule("bert.encoder.layer")
    for layer in layers:
        plan: dict[str, ParallelStyle] = {
            f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")
        }
        plan |= {"attention.output.dense": RowwiseParallel(), "intermediate.dense": ColwiseParallel()}
        parallelize_module(layer, mesh, plan | {"output.dense": RowwiseParallel()})
    return model


def split_gpt(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron-LM's plan: matrices by columns, then by rows; the head by columns, its logits gathered."""
    layers: Any = model.get_submodule("layers")
    for layer in layers:
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        parallelize_module(layer, mesh, plan | {"out": RowwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


class HalfBatch(nn.Module):
    """Each process runs the whole model on its part of the batch, and the results are gathered."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        part = self.model(*(x.chunk(size)[rank] for x in inputs))
        whole = part.new_empty(part.shape[0] * size, *part.shape[1:])
        dist.all_gather_into_tensor(whole, part)
        return whole


@dataclass(frozen=True)
class Peer:
    """A model in PyTorch: how it is made from the file or folder with its weights, and how it is split, if at all."""

    build: Callable[[Path], nn.Module]
    split: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None


GPT2 = replace(sizes.GPT2, sequence=128)


def _made(name: str, _weights: Path) -> nn.Module:
    return modules.make(name)


PEERS = {
    "minilm": Peer(SentenceEncoder, split_encoder),
    "gpt2": Peer(lambda file: torch_models.GPT(GPT2).load(file), split_gpt),
    "resnet50": Peer(lambda file: torch_models.resnet50().load(file), lambda model, _: HalfBatch(model)),
    **{name: Peer(partial(_made, name)) for name in modules.NAMES},
}


def make(name: str, weights: Path, how: str, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The model ready to be called, ``eager``, by ``compile``, or ``parallel``: then this process is one of several.

    By ``onnxruntime`` or ``openvino``, in float32, from a file that PyTorch exports for tensors like ``inputs``; by
    ``onnxruntime_int8`` or ``openvino_int8`` as each of them quantizes it.
    """
    model = PEERS[name].build(weights).eval()
    if how in RUNTIMES:
        return RUNTIMES[how](model, inputs, torch.get_num_threads())
    if how == "parallel":
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        split = PEERS[name].split
        if split is None:
            raise ValueError(f"Nothing splits {name!r}: its case has no parallel variant")
        model = split(model, mesh)
    run = torch.compile(model) if how == "compile" else model

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        # DTensor's collectives do not run in inference mode.
        with torch.no_grad() if how == "parallel" else torch.inference_mode():
            return run(*inputs)

    return call


@contextmanager
def exported(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[Path]:
    """The model as a file of ONNX's format, while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(model, tuple(inputs), file, dynamo=True, external_data=False)
        yield file


def by_onnxruntime(model: nn.Module, inputs: Sequence[torch.Tensor], threads: int) -> Callable[..., Any]:
    """The model in ONNX Runtime, with all of its optimizations, which are the default."""
    with exported(model, inputs) as file:
        return _onnxruntime_session(file, threads)


def by_onnxruntime_int8(model: nn.Module, inputs: Sequence[torch.Tensor], threads: int) -> Callable[..., Any]:
    """The model in ONNX Runtime with products in 8 bits, whose activations are quantized in each call.

    Its sums of pairs of products have 16 bits where the processor has no instructions for 8-bit dot products (VNNI), so
    that weights have 7 bits there, as its manual says.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    has_vnni = any("vnni" in feature for feature in features())
    with exported(model, inputs) as file:
        prepared, quantized = file.with_name("prepared.onnx"), file.with_name("int8.onnx")
        quant_pre_process(str(file), str(prepared))
        quantize_dynamic(prepared, quantized, per_channel=True, reduce_range=not has_vnni, weight_type=QuantType.QInt8)
        return _onnxruntime_session(quantized, threads)


def _onnxruntime_session(file: Path, threads: int) -> Callable[..., Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda *tensors: session.run(None, {n: x.numpy() for n, x in zip(names, tensors, strict=True)})[0]


def by_openvino(model: nn.Module, inputs: Sequence[torch.Tensor], threads: int) -> Callable[..., Any]:
    """The model in OpenVINO, for the latency of one call, in float32 also where the processor has bfloat16."""
    import openvino

    with exported(model, inputs) as file:
        return _openvino_request(openvino.Core().read_model(str(file)), threads)


def by_openvino_int8(model: nn.Module, inputs: Sequence[torch.Tensor], threads: int) -> Callable[..., Any]:
    """The model in OpenVINO as NNCF quantizes it, weights and activations, from the ranges that the inputs give."""
    import nncf
    import openvino

    with exported(model, inputs) as file:
        whole = openvino.Core().read_model(str(file))
    examples = nncf.Dataset([[x.numpy() for x in inputs]])
    quantized = nncf.quantize(whole, examples, model_type=nncf.ModelType.TRANSFORMER, subset_size=1)
    return _openvino_request(quantized, threads)


def _openvino_request(model: Any, threads: int) -> Callable[..., Any]:
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda *tensors: request.infer([x.numpy() for x in tensors])[0]


RUNTIMES = {
    "onnxruntime": by_onnxruntime,
    "openvino": by_openvino,
    "onnxruntime_int8": by_onnxruntime_int8,
    "openvino_int8": by_openvino_int8,
}
"""Other runtimes, by the names of their packages (the extra ``bench``), and how they quantize."""
