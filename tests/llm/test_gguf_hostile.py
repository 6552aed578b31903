"""GGUF files with wrong fields: an error that says which, or a model that is right; never another error, or a hang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.llm.gguf_raw import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, RawFile, RawTensor, Value, llama

from hidet_dist.errors import ConfigError, HidetDistError, WeightsError
from hidet_dist.limits import MOST_GGUF_ENTRIES
from hidet_dist.llm.checkpoint import Checkpoint
from hidet_dist.weights.gguf_file import GgufFile
from hidet_dist.weights.sources import source_of

NAN, INF = float("nan"), float("inf")
KINDS = {kind: llama(kind) for kind in ("gpt2", "llama")}
BYTE_LEVEL = KINDS["gpt2"]
ODD: list[Value] = [
    *((UINT32, number) for number in (0, 1, 3, 7, 2**32 - 1)),
    *((INT32, number) for number in (-1, -4, -(2**31))),
    *((10, 2**64 - 1), (11, -(2**63)), (0, 255), (1, -128), (2, 65535), (3, -32768)),
    *((FLOAT32, number) for number in (NAN, INF, -INF, 0.0, -1.0, 3.4e38, 1e-45)),
    *((12, number) for number in (NAN, 1e308, 5e-324)),
    *((BOOL, flag) for flag in (True, False)),
    *((STRING, text) for text in ("", "x", "\0", "$A", "a:b", "x" * 5000, b"\xff\xfe", "\u0663")),
    *((ARRAY, value) for value in ((UINT32, []), (UINT32, [4, 4]), (STRING, ["a", "b"]), (FLOAT32, [NAN]))),
    *((ARRAY, value) for value in ((ARRAY, []), (99, []), (BOOL, [True]))),
    (13, b""),
    (2**32 - 1, b""),
]
MORE_KEYS = (
    *("general.alignment", "general.type", "split.count", "llama.expert_count", "llama.expert_used_count"),
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length"),
    *("tokenizer.ggml.padding_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.add_space_prefix"),
    *("tokenizer.ggml.add_eos_token", "tokenizer.ggml.merges", "tokenizer.ggml.scores"),
)
SIZES = (0, 1, 2, 3, 5, 31, 33, 255, 256, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
NAMES = ("", "x", "blk.0.attn_q.weight", f"blk.{'1' * 5000}.attn_q.weight", "blk.-1.attn_q.weight", "output.weight")


def loaded(path: Path, whole: bool) -> None:
    """Load a file, with the values of its weights if ``whole``. Raises only what loading raises."""
    checkpoint = Checkpoint.open(path)
    tokenizer = checkpoint.tokenizer()
    tokens = tokenizer.encode("The quick 12 é")
    assert all(0 <= token < tokenizer.vocabulary for token in tokens)
    assert all(isinstance(tokenizer.piece(token), bytes) for token in range(tokenizer.vocabulary))
    if whole:
        module, weights = checkpoint.module("float32")
        shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
        for name, weight in weights.items():
            read = source_of(weight).read([slice(0, int(size)) for size in weight.shape])
            assert tuple(read.shape) == shapes[name]
    ordered = sorted(GgufFile.open(path).tensors.values(), key=lambda tensor: tensor.begin)
    assert all(one.begin + one.nbytes <= other.begin for one, other in itertools.pairwise(ordered))
    assert ordered[-1].begin + ordered[-1].nbytes <= path.stat().st_size


def is_refused(path: Path, data: bytes, whole: bool) -> bool:
    path.write_bytes(data)
    try:
        loaded(path, whole)
    except HidetDistError as error:
        assert str(path) in str(error) or "The files" in str(error)  # the last is of weights, which are of many files
        assert len(str(error)) < 3000
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_the_unchanged_file_loads(tmp_path: Path, kind: str):
    assert not is_refused(tmp_path / "a.gguf", KINDS[kind].written(), True)


def _with_tokens(places: dict[int, str]) -> RawFile:
    tokens = list(BYTE_LEVEL.value("tokenizer.ggml.tokens")[1])
    for place, token in places.items():
        tokens[place] = token
    return BYTE_LEVEL.with_value("tokenizer.ggml.tokens", (ARRAY, (STRING, tokens)))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (BYTE_LEVEL.with_tensor(1, name=f"blk.{'1' * 5000}.attn_q.weight"), "is not known for the architecture llama"),
        (BYTE_LEVEL.with_tensor(3, name="blk.00.attn_q.weight"), r"'blk\.00\.attn_q\.weight' is not known"),
        (BYTE_LEVEL.with_tensor(3, name="blk.\u0660.attn_q.weight"), "is not known"),
        (
            replace(BYTE_LEVEL, tensors=[*BYTE_LEVEL.tensors, RawTensor("blk.01.attn_norm.weight", [32])]),
            r"'blk\.01\.attn_norm\.weight' is not known",
        ),
        (
            replace(
                BYTE_LEVEL,
                tensors=[
                    *BYTE_LEVEL.tensors,
                    *(RawTensor(f"blk.{'9' * 5000}.ffn_{part}_exps.weight", [32, 32, 2]) for part in ("gate", "up")),
                    RawTensor(f"blk.{'9' * 5000}.ffn_down_exps.weight", [32, 32, 2]),
                ],
            ),
            "is not known",
        ),
        (BYTE_LEVEL.with_tensor(1, offset=64), "'token_embd.weight' and 'output_norm.weight' share bytes"),
        (BYTE_LEVEL.with_tensor(0, offset=8), "'token_embd.weight' is at 8 bytes .* no multiple of the alignment, 32"),
        (BYTE_LEVEL.with_value("general.alignment", (UINT32, 24)), "alignment must be a power of two .* it is 24"),
        (BYTE_LEVEL.with_value("general.alignment", (BOOL, True)), "alignment must be a power of two .* it is True"),
        (BYTE_LEVEL.with_value("x", (ARRAY, (0, bytes(MOST_GGUF_ENTRIES)))), "entries of its header; at most"),
        *(
            (BYTE_LEVEL.with_value(f"llama.{key}", value), f"llama.{key} must be")
            for key, value in (
                ("context_length", (UINT32, 0)),
                ("context_length", (FLOAT32, 128.0)),
                ("attention.head_count_kv", (BOOL, True)),
                ("attention.head_count_kv", (INT32, -2)),
                ("attention.key_length", (UINT32, 0)),
                ("feed_forward_length", (INT32, -64)),
                ("attention.layer_norm_rms_epsilon", (FLOAT32, NAN)),
                ("attention.layer_norm_rms_epsilon", (FLOAT32, -1e-5)),
                ("attention.layer_norm_rms_epsilon", (UINT32, 1)),
                ("rope.freq_base", (FLOAT32, INF)),
                ("rope.freq_base", (FLOAT32, 0.0)),
                ("rope.scaling.factor", (FLOAT32, NAN)),
                ("vocab_size", (UINT32, 0)),
            )
        ),
        (BYTE_LEVEL.with_value("llama.embedding_length", None), "has no llama.embedding_length"),
        (_with_tokens({50: "a" * 40000}), "tokens of up to 40000 characters"),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, file: RawFile, said: str):
    (tmp_path / "a.gguf").write_bytes(file.written())
    with pytest.raises((ConfigError, WeightsError), match=said):
        loaded(tmp_path / "a.gguf", True)


@pytest.mark.parametrize("token", ["$A", "$B", "a:1", "", "{}", " "])
def test_any_token_may_begin_a_text(tmp_path: Path, token: str):
    path = tmp_path / "a.gguf"
    path.write_bytes(_with_tokens({1: token}).written())
    assert Checkpoint.open(path).tokenizer().encode("The")[0] == 1


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A file with one to three wrong fields."""
    file: RawFile = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    keys = [*dict(file.metadata), *MORE_KEYS]
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["value", "value", "drop", "twice", "entry", "count", "tensor", "raw", "raw"]))
        key = draw(st.sampled_from(keys))
        place = draw(st.integers(0, len(file.tensors) - 1))
        if kind == "value":
            file = file.with_value(key, draw(st.sampled_from(ODD)))
        elif kind == "drop":
            file = file.with_value(key, None)
        elif kind == "twice":
            file = replace(file, metadata=[*file.metadata, file.metadata[0]])
        elif kind == "entry":
            key = draw(st.sampled_from([name for name, (code, _) in file.metadata if code == ARRAY] or [key]))
            of, entries = dict(file.metadata).get(key, (ARRAY, (STRING, [])))[1]
            odd = draw(st.sampled_from([value for code, value in ODD if code == of] or [0]))
            file = file.with_value(key, (ARRAY, (of, _changed_list(draw, entries, odd))))
        elif kind == "count":
            name = draw(st.sampled_from(["key_count", "tensor_count", "version", "alignment"]))
            values = (1, 8, 64, 4096) if name == "alignment" else (2, 3) if name == "version" else SIZES
            file = replace(file, **{name: draw(st.sampled_from(values))})
        elif kind == "tensor":
            changes: dict[str, Any] = {
                "name": draw(st.sampled_from([*NAMES, file.tensors[place].name])),
                "dims": draw(st.lists(st.sampled_from(SIZES), max_size=6) | st.just(list(file.tensors[place].dims))),
                "code": draw(st.integers(0, 40)),
                "offset": draw(st.sampled_from(SIZES)),
            }
            name = draw(st.sampled_from(sorted(changes)))
            file = file.with_tensor(place, **{name: changes[name]})
        else:
            return _changed_bytes(draw, file)
    return file.written()


def _changed_list(draw: st.DrawFn, entries: Any, odd: Any) -> list[Any]:
    result = list(entries)
    change = draw(st.sampled_from(["set", "drop", "add", "none"]))
    place = draw(st.integers(0, max(len(result) - 1, 0)))
    if change == "none":
        return []
    if change == "add":
        return [*result, odd]
    result[place : place + 1] = [odd] if change == "set" else []
    return result


def _changed_bytes(draw: st.DrawFn, file: RawFile) -> bytes:
    """Cut a file, or write over 1, 4 or 8 bytes of its header."""
    data, end = file.written(), len(file.header())
    place = draw(st.integers(0, end - 1))
    if draw(st.booleans()):
        return data[:place]
    size = draw(st.sampled_from([1, 4, 8]))
    number = draw(st.sampled_from(SIZES) | st.integers(0, 2**64 - 1)) % 2 ** (8 * size)
    return data[:place] + number.to_bytes(size, "little") + data[place + size :]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("gguf") / "a.gguf"


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(data=changed())
def test_wrong_fields_are_refused_or_the_model_is_right(scratch: Path, data: bytes):
    is_refused(scratch, data, False)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=changed())
def test_wrong_fields_are_refused_or_the_whole_model_is_right(scratch: Path, data: bytes):
    is_refused(scratch, data, True)


@pytest.mark.slow
def test_a_file_cut_at_each_byte_of_its_header_is_refused(scratch: Path):
    file = BYTE_LEVEL.with_value("tokenizer.ggml.merges", None)
    data, end = file.written(), len(file.header())
    for cut in (*range(0, min(end, 4000)), *range(4000, end, 7), end):
        scratch.write_bytes(data[:cut])
        with pytest.raises(WeightsError):
            GgufFile.open(scratch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_key_with_each_odd_value(scratch: Path, kind: str):
    file = KINDS[kind]
    refused = [
        is_refused(scratch, file.with_value(key, value).written(), True)
        for key, value in itertools.product([*dict(file.metadata), *MORE_KEYS], [*ODD, None])
    ]
    assert np.mean(refused) > 0.5
