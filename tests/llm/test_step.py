"""The inputs of a ragged step: the rows that tokens attend to, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hidet_dist.errors import InputError
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs

SIZES = StepSizes(vocabulary=50, context=64, pages=10, page=4, states=3, tokens=8)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# Tokens 5 and 6 of a sequence on pages 7 and 2; token 0 of another one on page 3.
STEP = StepInputs(
    tokens=integers(11, 12, 13),
    positions=integers(5, 6, 0),
    slots=integers(2 * 4 + 1, 2 * 4 + 2, 3 * 4),
    sequences=integers(0, 0, 1),
    lengths=integers(6, 7, 1),
    tables=np.array([[7, 2], [3, 3]], np.int64),
    states=integers(0, 2),
    wanted=integers(1, 2),
    page=4,
)


def test_the_rows_of_a_token_are_those_of_its_sequence_in_order():
    STEP.check(SIZES)
    assert STEP.longest == 7
    assert STEP.starts.tolist() == [0, 2]
    assert STEP.sequence_rows()[0].tolist() == [28, 29, 30, 31, 8, 9, 10]
    rows = STEP.token_rows(10)
    assert rows.shape == (3, 10)
    for token in range(3):
        assert rows[token, STEP.lengths[token] - 1] == STEP.slots[token]
    assert rows[2, 0] == 12
    assert (rows < SIZES.rows).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": integers(11, 12, 50)}, "tokens of a step has values outside 0 to 49"),
        ({"slots": integers(9, 10, 40)}, "slots of a step"),
        ({"tables": np.array([[7, 10], [3, 3]], np.int64)}, "tables of a step"),
        ({"sequences": integers(0, 0, 2)}, "sequences of a step"),
        ({"states": integers(0, 3)}, "states of a step"),
        ({"wanted": integers(3)}, "wanted of a step"),
        ({"page": 8}, "pages have 8 rows"),
        ({"lengths": integers(6, 8, 1)}, "attends to other rows"),
        ({"tables": np.array([[7], [3]], np.int64)}, "attends to other rows"),
        ({"positions": integers(5, 6)}, r"positions of a step is int64\[2\]"),
        ({"tokens": np.zeros(3, np.int32)}, r"tokens of a step is int32\[3\]"),
    ],
)
def test_a_step_that_does_not_fit_the_model_is_refused(changes: dict, said: str):
    with pytest.raises(InputError, match=said):
        replace(STEP, **changes).check(SIZES)


def test_a_step_has_a_bound_of_tokens():
    with pytest.raises(InputError, match="takes 1 to 2"):
        STEP.check(replace(SIZES, tokens=2))
