"""JSON text: the first levels an entry a line, the same values as Python's encoder."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.files import json_text

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
