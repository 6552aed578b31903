"""GGUF files: models written by the ``gguf`` package are those of transformers, and malformed files are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.llm.gguf_made import Q, model_of, write

from hidet_dist.errors import ConfigError, HidetDistError, WeightsError
from hidet_dist.llm.checkpoint import Checkpoint
from hidet_dist.weights.gguf_file import ENCODINGS, GgufFile
from hidet_dist.weights.sources import source_of

RARER = ("mixtral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "smollm3")
KINDS = ("llama", "qwen3_moe", "gemma3_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARER))


# What the configuration of such a model says, and the file does not, or what is to be tested beside.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 24, "attn_logit_softcapping": 20.0},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 24, "num_hidden_layers": 6},
}


def whole(tensor: Any) -> torch.Tensor:
    return source_of(tensor).read([slice(0, int(size)) for size in tensor.shape])


def loaded(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of transformers that a file makes, with the file's weights in it."""

    def prepare(config: Any) -> None:
        config._attn_implementation = "eager"

    module, stored = Checkpoint.open(path).module("float32", prepare)
    state = {name: whole(x) for name, x in stored.items()}
    module.load_state_dict(state, strict=False, assign=True)
    return module, state


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_model(tmp_path: Path, kind: str):
    model = model_of(kind, **CHANGES.get(kind, {}))
    write(tmp_path / "a.gguf", model, kind)
    module, _ = loaded(tmp_path / "a.gguf")
    tokens = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = model(input_ids=tokens).logits, module(input_ids=tokens).logits
    assert torch.equal(got, expected) or (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("quantized", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_quantized_weights_are_those_of_the_reference(tmp_path: Path, quantized: Any):
    model = model_of("llama")
    values = write(tmp_path / "a.gguf", model, "llama", quantized)
    _, state = loaded(tmp_path / "a.gguf")
    assert state.keys() >= values.keys()
    for name, expected in values.items():
        assert torch.equal(state[name], expected), name


@pytest.mark.parametrize("code", sorted(ENCODINGS))
def test_any_region_is_that_of_the_dequantized_tensor(tmp_path: Path, code: int):
    kind, encoding = Q(code), ENCODINGS[code]
    assert encoding.name == kind.name
    if encoding.elements > 1:
        assert (encoding.elements, encoding.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    shape = (3, 5, 2 * encoding.elements)
    generator = np.random.default_rng(code)
    packed = generator.integers(0, 256, (3, 5, 2 * encoding.nbytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("before", np.zeros(3, np.float32))
    writer.add_tensor("x", packed, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    tensor = GgufFile.open(tmp_path / "a.gguf").tensors["x"]
    assert tensor.shape == shape
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(packed, kind).astype(np.float32)).reshape(shape)
        for region in ([(0, 3), (0, 5), (0, shape[2])], [(1, 3), (2, 4), (1, shape[2] - 1)], [(2, 2), (0, 5), (0, 1)]):
            part = tuple(slice(*bounds) for bounds in region)
            got = tensor.read(part)
            assert got.is_contiguous()
            assert torch.equal(got.float().nan_to_num(7), expected[part].nan_to_num(7))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0"),
        ({"llama.attention.value_length": 8}, "value_length is 8"),
        ({"llama.block_count": 0}, "block_count must be a whole number of at least 1; it is 0"),
        ({"llama.block_count": -3.5}, "block_count must be of type int"),
        ({"llama.attention.head_count": "four"}, "head_count must be of type"),
        ({"general.type": "adapter"}, "not a whole model"),
        ({"split.count": 3}, "one of several parts"),
        ({"llama.block_count": 10**9}, "num_hidden_layers"),
        ({"llama.block_count": 3}, "lack"),
        ({"llama.block_count": 1}, r"'blk\.1\..*not known for the architecture llama with 1 blocks"),
        ({"llama.embedding_length": 128}, "shape"),
        ({"llama.attention.head_count_kv": 3}, "rows|num_key_value_heads|shape"),
        ({"llama.vocab_size": 4 * 10**9}, "vocab|shape|bytes"),
    ],
)
def test_metadata_that_would_change_results_or_lies_is_refused(tmp_path: Path, metadata: dict[str, Any], said: str):
    write(tmp_path / "a.gguf", model_of("llama"), "llama", **metadata)
    with pytest.raises((ConfigError, WeightsError), match=said):
        Checkpoint.open(tmp_path / "a.gguf").module("float32")


def test_rotary_scalings_are_read(tmp_path: Path):
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = model_of("llama", rope_parameters=llama3)
    plain = model_of("llama")
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert factors.max() > 2
    path = tmp_path / "a.gguf"
    writer_of = gguf.GGUFWriter.write_header_to_file

    def with_factors(self: gguf.GGUFWriter, *args: Any) -> None:
        self.add_tensor("rope_freqs.weight", factors.numpy())
        writer_of(self, *args)

    gguf.GGUFWriter.write_header_to_file = with_factors
    try:
        write(path, model, "llama")
    finally:
        gguf.GGUFWriter.write_header_to_file = writer_of
    module, _ = loaded(path)
    assert torch.equal(module.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model = model_of("qwen3", rope_parameters=yarn)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    write(path, model, "qwen3", **{f"qwen3.rope.scaling.{key}": value for key, value in scaling.items()})
    module, _ = loaded(path)
    assert torch.equal(module.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert module.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "a.gguf"
    write(path, model_of("llama"), "llama", **{"general.architecture": "rwkv6"})
    with pytest.raises(WeightsError, match="architecture 'rwkv6'"):
        Checkpoint.open(path)


def header(*parts: Any) -> bytes:
    """Bytes of a header: texts with their lengths, and numbers as (format, value)."""
    data = b""
    for part in parts:
        if isinstance(part, str):
            data += struct.pack("<Q", len(part)) + part.encode()
        elif isinstance(part, tuple):
            data += struct.pack(f"<{part[0]}", part[1])
        else:
            data += part
    return data


MAGIC = [b"GGUF", ("I", 3)]
TENSOR = [("Q", 1), ("Q", 0), "x", ("I", 1)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "ends after 0 bytes"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (header(b"GGUF", ("I", 1), bytes(60)), "version is 1"),
        (header(b"GGUF", (">I", 3)[0:1] and b"\0\0\0\3", bytes(60)), "version is 50331648"),
        (header(*MAGIC, ("Q", 2**62), ("Q", 0), bytes(64)), "counts 4611686018427387904 tensors"),
        (header(*MAGIC, ("Q", 0), ("Q", 2**40), bytes(64)), "counts 1099511627776 keys"),
        (header(*MAGIC, ("Q", 0), ("Q", 1), ("Q", 2**63), bytes(64)), "goes on to byte"),
        (header(*MAGIC, ("Q", 0), ("Q", 1), "k", ("I", 99), bytes(64)), "unknown type 99"),
        (header(*MAGIC, ("Q", 0), ("Q", 1), "k", ("I", 9), ("I", 9), ("Q", 1), bytes(64)), "list of the type 9"),
        (header(*MAGIC, ("Q", 0), ("Q", 1), "k", ("I", 9), ("I", 0), ("Q", 2**50), bytes(64)), "elements of 'k'"),
        (header(*MAGIC, ("Q", 0), ("Q", 2), "k", ("I", 0), b"1", "k", ("I", 0), b"1", bytes(64)), "the key 'k' twice"),
        (header(*MAGIC, ("Q", 0), ("Q", 1), ("Q", 2), b"\xff\xfe", ("I", 0), bytes(64)), "utf-8"),
        (header(*MAGIC, ("Q", 1), ("Q", 0), "x", ("I", 9), bytes(200)), "has 9 dims"),
        (header(*MAGIC, *TENSOR, ("Q", 2**61), ("I", 0), ("Q", 0), bytes(64)), "and the file has"),
        (header(*MAGIC, *TENSOR, ("Q", 0), ("I", 0), ("Q", 0), bytes(64)), "no dim may be 0"),
        (header(*MAGIC, *TENSOR, ("Q", 33), ("I", 8), ("Q", 0), bytes(64)), "blocks of 32"),
        (header(*MAGIC, *TENSOR, ("Q", 4), ("I", 39), ("Q", 0), bytes(64)), "encoding of code 39"),
        (header(*MAGIC, *TENSOR, ("Q", 4), ("I", 0), ("Q", 2**63), bytes(64)), "and the file has"),
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, data: bytes, said: str):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=said):
        Checkpoint.open(tmp_path / "a.gguf")


def test_a_file_cut_anywhere_or_with_a_byte_changed_raises_an_error_of_ours_or_is_right(tmp_path: Path):
    path = tmp_path / "a.gguf"
    write(path, model_of("llama"), "llama")
    data = path.read_bytes()
    end = min(tensor.begin for tensor in GgufFile.open(path).tensors.values())
    generator = np.random.default_rng(0)
    for cut in (*generator.integers(0, end, 40), len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(WeightsError):
            GgufFile.open(path)
    for place in generator.integers(0, end, 150):
        path.write_bytes(data[:place] + bytes([data[place] ^ int(generator.integers(1, 256))]) + data[place + 1 :])
        try:
            file = Checkpoint.open(path)
        except HidetDistError:
            continue
        assert file.configuration.fields


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path):
    path = tmp_path / "a.gguf"
    write(path, model_of("llama"), "llama")
    tensor = GgufFile.open(path).tensors["token_embd.weight"]
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(WeightsError, match="has changed"):
        tensor.read([slice(0, 2), slice(0, 64)])
