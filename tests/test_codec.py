"""JSON forms of dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.codec import (
    OMITTED,
    RUNS,
    UNWRITTEN,
    Key,
    Positive,
    Signed,
    decode,
    encode,
    encode_with_format,
    of_format,
)
from hidet_dist.errors import SpecError
from hidet_dist.spec import TensorShardSpec


@dataclass(frozen=True)
class Part:
    name: str
    size: Positive
    shape: Annotated[tuple[int | str, ...], OMITTED] = ()
    loss: Signed | None = None


@dataclass(frozen=True)
class Whole:
    parts: Annotated[tuple[Part, ...], Key("pieces")]
    spec: TensorShardSpec
    counts: Mapping[int, tuple[bool, float]]
    ranks: Annotated[tuple[int, ...], RUNS] = ()
    first: Annotated[Part | None, OMITTED] = None
    note: Annotated[str, UNWRITTEN] = field(default="none", compare=False)


PARTS = st.builds(
    Part,
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(1, 2**63 - 1),
    st.lists(st.integers(0, 9) | st.just("batch")).map(tuple),
    st.none() | st.integers(-9, 9) | st.floats(-1e9, 1e9),
)
WHOLES = st.builds(
    Whole,
    st.lists(PARTS).map(tuple),
    st.sampled_from(["(R)", "(S0, R)"]).map(TensorShardSpec.parse),
    st.dictionaries(st.integers(0, 99), st.tuples(st.booleans(), st.floats(0, 1))),
    st.sets(st.integers(0, 20)).map(sorted).map(tuple),
    st.none() | PARTS,
)


@given(WHOLES)
def test_what_is_written_is_read_again(whole: Whole) -> None:
    text = json.dumps(encode(whole))
    assert decode(Whole, json.loads(text), "it") == whole
    assert json.dumps(encode(decode(Whole, json.loads(text), "it"))) == text


def test_the_form_follows_from_the_annotations() -> None:
    whole = Whole((Part("a", 1),), TensorShardSpec.parse("(S0, R)"), {7: (True, 0.5)}, (0, 1, 2, 5), note="unwritten")
    assert encode(whole) == {
        "pieces": [{"name": "a", "size": 1, "loss": None}],
        "spec": "(S0, R)",
        "counts": {"7": [True, 0.5]},
        "ranks": [[0, 2], [5, 5]],
    }


def test_a_format_is_written_first_and_no_other_one_is_read() -> None:
    part = Part("a", 1)
    written = json.loads(json.dumps(encode_with_format(part, 3)))
    assert next(iter(written)) == "format"
    assert decode(Part, of_format(written, 3), "it") == part
    for value, says in (
        (written | {"format": 4}, "format 4, and this version reads format 3"),
        (written | {"format": "3"}, "format '3'"),
        (encode(part), "format None"),
        ([written], "must be an object"),
    ):
        with pytest.raises(SpecError, match=says):
            of_format(value, 3)
    with pytest.raises(SpecError, match="format True"):
        of_format({"format": True}, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pieces": {}}, "it.pieces must be a list"),
        ({"pieces": [{"name": "a", "size": 0}]}, r"it.pieces\[0\].size must be a whole number from 1"),
        ({"pieces": [{"name": "a", "size": True}]}, r"it.pieces\[0\].size must be a whole number"),
        ({"pieces": [{"name": "\ud800", "size": 1}]}, "lone surrogates"),
        ({"pieces": [{"name": "a"}]}, r"it.pieces\[0\] has no 'size'"),
        ({"pieces": [{"name": "a", "size": 1, "shape": [1.5]}]}, r"shape\[0\] must be int or str"),
        ({"pieces": [{"name": "a", "size": 1, "loss": float("nan")}]}, "loss must be a number from"),
        ({"spec": "(S0"}, "it.spec is malformed"),
        ({"spec": 1}, "it.spec must be text"),
        ({"counts": {"-1": [True, 0]}}, "its keys are whole numbers"),
        ({"counts": {"1": [True, -1]}}, r"it.counts.1\[1\] must be a number from 0"),
        ({"counts": {"1": [True]}}, "must be a list of 2"),
        ({"ranks": [[0, 2**40]]}, "has more than"),
        ({"first": []}, "it.first must be an object"),
        ({"note": "x"}, "unknown key 'note'"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_place(change: dict[str, Any], says: str) -> None:
    valid = {"pieces": [], "spec": "(R)", "counts": {}}
    decode(Whole, valid, "it")
    with pytest.raises(SpecError, match=says):
        decode(Whole, {**valid, **change}, "it")
