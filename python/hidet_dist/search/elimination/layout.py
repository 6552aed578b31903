"""The variables and the factors of a network, laid out as arrays: all tensors with equal tables at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hidet_dist.search.problem.equal_parts import Integers, ranges


@dataclass(frozen=True)
class TensorTable:
    """A table for a network, wherever its tensor is: the number of the table, and its dims.

    A dim has the number of the entity among the tensor's producer and readers. If the dim is not over that entity's
    choices but over its specs, it also has the number of specs, and of the table that ties them to the choices.
    """

    table: int
    dims: tuple[tuple[int, int, int | None], ...]


class _JoinedLists:
    """Lists of numbers joined to one array, with the begin and the length of each."""

    def __init__(self, lists: Sequence[Sequence[int]]):
        self.values = np.array([value for own in lists for value in own], dtype=np.int64)
        self.counts = np.array([len(own) for own in lists], dtype=np.int64)
        self.begins = np.cumsum(self.counts) - self.counts

    def of(self, numbers: Integers) -> Integers:
        """Join the lists of these numbers."""
        joined: Integers = self.values[ranges(self.begins[numbers], self.counts[numbers])]
        return joined


class VariableLayout:
    """The variables of entities, and those for the specs of tensors; and the factors over them.

    Attributes
    ----------
    sizes: the number of values of each variable: first the entities', then, tensor by tensor, those of specs.
    factors: the number of the table of each factor: first one for each entity, then those of the tensors.
    ends, variables: the variables of the factors, one factor after the other, and for each where its own end.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        of_entities: Integers,
        recipes: Sequence[Sequence[TensorTable]],
        numbers: Sequence[int],
        ends: Integers,
        ends_begin: Integers,
    ):
        """Lay out the table of each entity, whose choices are ``sizes``, and the tables of each tensor.

        Tensor n has the tables ``recipes[numbers[n]]`` over its entities, which begin at ``ends[ends_begin[n]]``.
        """
        entities = len(sizes)
        self._recipe, self._numbers = [_Recipe(recipe) for recipe in recipes], numbers
        number = np.array(numbers, dtype=np.int64)
        more = _JoinedLists([recipe.sizes for recipe in self._recipe])
        factors = _JoinedLists([recipe.factors for recipe in self._recipe])
        lengths = _JoinedLists([recipe.lengths for recipe in self._recipe])
        places = _JoinedLists([recipe.places for recipe in self._recipe])
        self.sizes = np.concatenate((np.array(sizes, dtype=np.int64), more.of(number)))
        self.factors = np.concatenate((of_entities, factors.of(number)))
        self.ends = np.cumsum(np.concatenate((np.ones(entities, dtype=np.int64), lengths.of(number))))
        counts = factors.counts[number]
        self._begin = entities + np.cumsum(counts) - counts
        # Places of tensors are those of entities, or, if negative, of its own variables.
        own = entities + np.cumsum(more.counts[number]) - more.counts[number]
        place, times = places.of(number), places.counts[number]
        is_own = place < 0
        variables = np.repeat(ends_begin, times) + place
        variables[is_own] = 0
        if len(ends):
            variables = ends[variables]
        variables[is_own] = (np.repeat(own, times) + ~place)[is_own]
        self.variables = np.concatenate((np.arange(entities), variables))

    def of_tensor(self, position: int) -> list[int]:
        """Return the numbers, among the factors, of the tables of the tensor at a position."""
        begin = int(self._begin[position])
        return [begin + factor for factor in self._recipe[self._numbers[position]].tables]

    def scope(self, factor: int) -> list[int]:
        """Return the variables of a factor."""
        begin = int(self.ends[factor - 1]) if factor else 0
        scope: list[int] = self.variables[begin : int(self.ends[factor])].tolist()
        return scope


class _Recipe:
    """The variables and the factors of a tensor, wherever it is.

    Attributes
    ----------
    sizes: the number of values of each of its own variables.
    factors: the numbers of the tables: before each one of the tensor, those that tie its own variables to choices.
    tables: which of the factors are the tables of the tensor.
    lengths, places: how many variables each factor has, and these one after the other: the number of one of the
        tensor's entities, or -1 - n for the own variable n.
    """

    def __init__(self, tables: Sequence[TensorTable]):
        self.sizes: list[int] = []
        self.factors: list[int] = []
        self.tables: list[int] = []
        self.lengths: list[int] = []
        self.places: list[int] = []
        own: dict[tuple[int, int], int] = {}
        for table in tables:
            places = []
            for end, size, tie in table.dims:
                place = end
                if tie is not None:
                    known = own.get((end, tie))
                    if known is None:
                        known = own[end, tie] = ~len(self.sizes)
                        self.sizes.append(size)
                        self._add(tie, (end, known))
                    place = known
                places.append(place)
            self.tables.append(len(self.factors))
            self._add(table.table, places)

    def _add(self, table: int, places: Sequence[int]) -> None:
        self.factors.append(table)
        self.lengths.append(len(places))
        self.places += places
