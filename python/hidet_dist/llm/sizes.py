"""The sizes of a loaded language model; see :mod:`hidet_dist.llm.step` for what they count."""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.codec import Positive


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a loaded model.

    Attributes
    ----------
    vocabulary: int
        Columns of the logits.
    context: int
        Tokens that a sequence may have, its prompt and what is generated together.
    pages: int
        Pages of the pools.
    page: int
        Rows of a page.
    states: int
        Rows of the states that a sequence has beside its pages, such as those of a convolution or a recurrence. It
        bounds the sequences that run at once.
    tokens: int
        Tokens that one step may have.
    shares_prefixes: bool
        Whether a sequence can start with the pages of another one that has the same tokens. A model with states beside
        its pages cannot.
    """

    vocabulary: Positive
    context: Positive
    pages: Positive
    page: Positive
    states: Positive
    tokens: Positive
    shares_prefixes: bool = True

    @property
    def rows(self) -> int:
        """Rows of the pools."""
        return self.pages * self.page
