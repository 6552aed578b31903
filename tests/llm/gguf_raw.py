"""GGUF files written field by field, so that each field can be wrong."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.llm.tokenizers_made import byte_level, sentence_piece

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34)}
"""Elements and bytes of a block, by the code of an encoding."""

Value = tuple[int, Any]
"""A type's code, and what is of this type; a list has the code of its elements beside them."""


@dataclass(frozen=True)
class RawTensor:
    """An entry of the table of tensors. ``offset`` is behind the tensor before by default."""

    name: str
    dims: Sequence[int]
    code: int = 0
    offset: int | None = None


@dataclass(frozen=True)
class RawFile:
    """A file. The counts are those of the lists unless they are given."""

    metadata: Sequence[tuple[str, Value]]
    tensors: Sequence[RawTensor]
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    def with_value(self, key: str, value: Value | None) -> RawFile:
        """The file with another value of a key, or without it."""
        kept = [(name, old) for name, old in self.metadata if name != key]
        return replace(self, metadata=kept if value is None else [*kept, (key, value)])

    def with_tensor(self, place: int, **changes: Any) -> RawFile:
        tensors = list(self.tensors)
        tensors[place] = replace(tensors[place], **changes)
        return replace(self, tensors=tensors)

    def value(self, key: str) -> Any:
        return dict(self.metadata)[key][1]

    def header(self) -> bytes:
        key_count = len(self.metadata) if self.key_count is None else self.key_count
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        parts = [b"GGUF", struct.pack("<IQQ", self.version, tensor_count, key_count)]
        for key, (code, value) in self.metadata:
            parts += [_text(key), struct.pack("<I", code), _value(code, value)]
        for tensor, offset in zip(self.tensors, self._offsets(), strict=True):
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            parts += [_text(tensor.name), dims, struct.pack("<IQ", tensor.code, offset)]
        return b"".join(parts)

    def written(self) -> bytes:
        header = self.header()
        size = sum(_padded(_nbytes(tensor), self.alignment) for tensor in self.tensors)
        data = np.random.default_rng(0).integers(0, 60, min(size, 2**20), np.uint8).tobytes()
        return header + bytes(-len(header) % self.alignment) + data

    def _offsets(self) -> list[int]:
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end if tensor.offset is None else tensor.offset)
            end += _padded(min(_nbytes(tensor), 2**40), self.alignment)
        return offsets


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _nbytes(tensor: RawTensor) -> int:
    elements, nbytes = BLOCKS.get(tensor.code, (1, 4))
    return math.prod(tensor.dims) // elements * nbytes


def _text(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(code: int, value: Any) -> bytes:
    if code == STRING:
        return _text(value)
    if code == ARRAY:
        of, entries = value
        data = entries if isinstance(entries, bytes) else b"".join(_value(of, entry) for entry in entries)
        return struct.pack("<IQ", of, len(entries)) + data
    return struct.pack(f"<{SCALARS[code]}", value) if code in SCALARS else bytes(value)


def llama(kind: str) -> RawFile:
    """A LLaMA of two layers, with a tokenizer of the ``kind`` gpt2 or llama."""
    tokenizer = byte_level() if kind == "gpt2" else sentence_piece()
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(numbers, key=lambda token: numbers[token])
    metadata: dict[str, Value] = {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (UINT32, 2),
        "llama.context_length": (UINT32, 128),
        "llama.embedding_length": (UINT32, 32),
        "llama.feed_forward_length": (UINT32, 64),
        "llama.attention.head_count": (UINT32, 4),
        "llama.attention.head_count_kv": (UINT32, 2),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
        "llama.attention.key_length": (UINT32, 8),
        "llama.attention.value_length": (UINT32, 8),
        "llama.rope.dimension_count": (UINT32, 8),
        "llama.rope.freq_base": (FLOAT32, 10000.0),
        "llama.vocab_size": (UINT32, len(tokens)),
        "tokenizer.ggml.model": (STRING, kind),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.eos_token_id": (UINT32, 2),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [_type(token) for token in tokens])),
        "tokenizer.chat_template": (STRING, "{{ messages }}"),
    }
    if kind == "gpt2":
        merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
        metadata |= {"tokenizer.ggml.pre": (STRING, "smollm"), "tokenizer.ggml.merges": (ARRAY, (STRING, merges))}
    else:
        metadata["tokenizer.ggml.scores"] = (ARRAY, (FLOAT32, [-float(number) for number in range(len(tokens))]))
    tensors = [RawTensor("token_embd.weight", [32, len(tokens)]), RawTensor("output_norm.weight", [32])]
    shapes: dict[str, tuple[list[int], int]] = {
        "attn_norm": ([32], 0),
        "attn_q": ([32, 32], 8),
        "attn_k": ([32, 16], 0),
        "attn_v": ([32, 16], 1),
        "attn_output": ([32, 32], 2),
        "ffn_norm": ([32], 0),
        "ffn_gate": ([32, 64], 0),
        "ffn_up": ([32, 64], 0),
        "ffn_down": ([64, 32], 0),
    }
    for block in range(2):
        tensors += [RawTensor(f"blk.{block}.{name}.weight", *shape) for name, shape in shapes.items()]
    return RawFile(list(metadata.items()), tensors)


def _type(token: str) -> int:
    if token in ("<s>", "</s>", "<|end|>", "<|im_start|>", "<|im_end|>"):
        return 3
    return 2 if token == "<unk>" else 6 if token.startswith("<0x") else 1
