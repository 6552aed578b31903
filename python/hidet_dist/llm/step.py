"""What a loaded language model offers to the engine: one ragged step over pools of rows.

A *step* takes tokens of any number of sequences at once, as one row of T tokens: parts of prompts beside single
tokens that are decoded. Keys and values are kept in *pools* of N rows. A row holds those of one token, in every layer.
``page`` consecutive rows are a *page*. A sequence owns pages, and its token at position p is kept in row ``p % page``
of its page number ``p // page``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import InputError
from hidet_dist.llm.sizes import StepSizes

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """What one step computes: T tokens of S sequences. All arrays are int64.

    The tokens of a sequence are consecutive, in the order of their positions. A step of more than one sequence holds
    each sequence once.

    Attributes
    ----------
    tokens, positions: arrays [T]
        The tokens, and the position of each in its sequence, from 0.
    slots: array [T]
        The row of the pools that each token's keys and values are written to, before attention reads them.
    sequences: array [T]
        The sequence of each token: a row of ``tables``, from 0.
    lengths: array [T]
        The number of rows that each token attends to: those of its own sequence up to itself, so its position plus 1.
    tables: array [S, P]
        The pages of each sequence, padded with its first page. Row l that a token attends to is row
        ``tables[s, l // page] * page + l % page`` of the pools.
    states: array [S]
        The row of the states beside the pools that each sequence has. Where a sequence's first token here has position
        0, the sequence starts: what the row held before is of another one.
    wanted: array [R]
        The tokens of the step whose logits are wanted, by their index, ascending. It may be empty.
    page: int
        Rows of a page.
    """

    tokens: Integers
    positions: Integers
    slots: Integers
    sequences: Integers
    lengths: Integers
    tables: Integers
    states: Integers
    wanted: Integers
    page: int

    @property
    def longest(self) -> int:
        """The most rows that a token of the step attends to."""
        return int(self.lengths.max(initial=0))

    @property
    def starts(self) -> Integers:
        """The index of each sequence's first token in the step [S]."""
        return np.searchsorted(self.sequences, np.arange(len(self.tables))).astype(np.int64)

    def sequence_rows(self, columns: int | None = None) -> Integers:
        """Return the rows of the pools that each sequence attends to [S, L].

        ``columns`` is L; by default it is ``longest``. What is past a sequence's length repeats rows of its first page.
        """
        columns = self.longest if columns is None else columns
        rows = (self.tables[:, :, None] * self.page + np.arange(self.page)).reshape(len(self.tables), -1)
        if columns > rows.shape[1]:
            rows = np.concatenate([rows, np.broadcast_to(rows[:, :1], (len(rows), columns - rows.shape[1]))], axis=1)
        return np.ascontiguousarray(rows[:, :columns])

    def token_rows(self, columns: int | None = None) -> Integers:
        """Return the rows of the pools that each token attends to [T, L], up to its length."""
        return self.sequence_rows(columns)[self.sequences]

    def check(self, sizes: StepSizes) -> None:
        """Check the step against a model's sizes.

        Raises
        ------
        InputError
            When shapes or dtypes are wrong, or an index is outside the model.
        """
        count, sequences = len(self.tokens), len(self.tables)
        shapes = {
            "tokens": (count,),
            "positions": (count,),
            "slots": (count,),
            "sequences": (count,),
            "lengths": (count,),
            "tables": (sequences, *self.tables.shape[1:2]),
            "states": (sequences,),
            "wanted": (len(self.wanted),),
        }
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.dtype != np.int64 or array.shape != shape:
                raise InputError(f"{name} of a step is {array.dtype}{list(array.shape)}; give int64{list(shape)}.")
        if not 1 <= count <= sizes.tokens:
            raise InputError(f"A step has {count} tokens; the model takes 1 to {sizes.tokens}.")
        if self.page != sizes.page:
            raise InputError(f"A step's pages have {self.page} rows; the model's have {sizes.page}.")
        limits = {
            "tokens": sizes.vocabulary,
            "positions": sizes.context,
            "slots": sizes.rows,
            "sequences": sequences,
            "tables": sizes.pages,
            "states": sizes.states,
            "wanted": count,
        }
        for name, limit in limits.items():
            array = getattr(self, name)
            if array.size and not (array.min() >= 0 and array.max() < limit):
                raise InputError(f"{name} of a step has values outside 0 to {limit - 1}.")
        if not np.array_equal(self.lengths, self.positions + 1) or self.longest > self.tables.shape[1] * self.page:
            raise InputError("A token attends to other rows than those of its sequence up to itself.")


class StepModel(Protocol):
    """A loaded language model. One thread calls ``step``, which need not be the one that loaded it."""

    @property
    def sizes(self) -> StepSizes:
        """The sizes of the model."""

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Compute one step, and return the logits of the tokens that are wanted [R, vocabulary].

        The result may be overwritten by the next step.

        Raises
        ------
        CallError, InputError
            When the step was refused. Nothing was written: later steps are possible.
        Exception
            When the model failed. Later steps are not possible.
        """

    def reset(self) -> None:
        """Forget all sequences."""

    def close(self) -> None:
        """Release the model's memory and processes. It may be called twice."""
