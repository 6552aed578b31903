"""JSON text: the first levels an entry a line, the same values as Python's encoder; nesting bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.files import json_text, parse_json
from hidet_dist.limits import MOST_NESTED

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(), of, max_size=3))


@given(VALUES, st.integers(0, 4))
def test_it_is_the_same_value(value: object, levels: int) -> None:
    assert json.loads(json_text(value, levels)) == value


def test_deeper_levels_are_on_one_line() -> None:
    value = {"mesh": "4", "operators": [{"name": "a", "specs": [1, 2]}, {"name": "b", "specs": []}]}
    assert json_text(value, 2).splitlines() == [
        "{",
        ' "mesh": "4",',
        ' "operators": [',
        '  {"name": "a", "specs": [1, 2]},',
        '  {"name": "b", "specs": []}',
        " ]",
        "}",
    ]


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"]\\"":'])
def test_texts_nested_too_deeply_are_refused_before_they_are_parsed(opening: str) -> None:
    closing = "".join("}" if bracket == "{" else "]" for bracket in reversed(opening) if bracket in "[{")
    for levels in (MOST_NESTED + 1, 1_000_000):
        with pytest.raises(ValueError, match="nested"):
            parse_json(opening * levels)
        with pytest.raises(ValueError, match="nested"):
            parse_json((opening * levels + "1" + closing * levels).encode())


def test_brackets_in_strings_and_beside_one_another_are_not_nested() -> None:
    deep = json.loads("[" * MOST_NESTED + "]" * MOST_NESTED)
    for value in (
        deep,
        "[" * 10 * MOST_NESTED,
        ['"[\\' * MOST_NESTED, {"[{" * MOST_NESTED: 1}],
        [[]] * 5 * MOST_NESTED,
    ):
        assert parse_json(json.dumps(value)) == value
