"""Sources of weights that are made from other sources: parts, casts, joined tensors. Nothing is read until they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Source(Protocol):
    """The data of a whole weight."""

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``, a slice with whole bounds and step 1 for each dim; contiguous."""
        ...


class SlicedSource:
    """A part of another source: ``part`` has a slice with integer bounds for each dim, and a step where it is not 1."""

    def __init__(self, whole: Source, part: Sequence[slice]):
        self.whole = whole
        self.part = tuple(part)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region`` of the part; contiguous."""
        steps = [bounds.step or 1 for bounds in self.part]
        begins = [
            bounds.start + step * wanted.start for bounds, wanted, step in zip(self.part, region, steps, strict=True)
        ]
        counts = [max(0, wanted.stop - wanted.start) for wanted in region]
        data = self.whole.read(
            [
                slice(begin, begin + step * (count - 1) + 1 if count else begin)
                for begin, count, step in zip(begins, counts, steps, strict=True)
            ]
        )
        if all(step == 1 for step in steps):
            return data
        return data[tuple(slice(None, None, step) for step in steps)].contiguous()


class Padded:
    """Another source with zeros beyond its extents."""

    def __init__(self, inner: Source, extents: Sequence[int]):
        self.inner = inner
        self.extents = tuple(extents)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``; contiguous."""
        there = [
            slice(min(bounds.start, extent), min(bounds.stop, extent))
            for bounds, extent in zip(region, self.extents, strict=True)
        ]
        data = self.inner.read(there)
        if there == list(region):
            return data
        result = torch.zeros([bounds.stop - bounds.start for bounds in region], dtype=data.dtype)
        result[tuple(slice(0, size) for size in data.shape)] = data
        return result


class Cast:
    """Another source of floating point, cast to a dtype."""

    def __init__(self, stored: Source, dtype: torch.dtype):
        self.stored = stored
        self.dtype = dtype

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``, cast; contiguous."""
        return cast_within(self.stored.read(region), self.dtype)


def cast_within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast ``values`` to ``dtype``; finite values beyond its range become its largest instead of infinity.

    Both dtypes are of floating point.
    """
    limit = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max > limit:
        values = torch.where(torch.isfinite(values), values.clamp(-limit, limit), values)
    return values.to(dtype)


class Joined:
    """Other sources, one after the other along ``dim``, in which they have ``extents``; all other dims are equal."""

    def __init__(self, parts: Sequence[Source], extents: Sequence[int], dim: int):
        self.parts = tuple(parts)
        self.extents = tuple(extents)
        self.dim = dim

    def within(self, region: Sequence[slice]) -> Iterator[tuple[Source, list[slice]]]:
        """Yield the parts that ``region`` reaches into, and the region of each."""
        wanted, begin = region[self.dim], 0
        for part, extent in zip(self.parts, self.extents, strict=True):
            start, stop = max(wanted.start, begin), min(wanted.stop, begin + extent)
            if start < stop:
                inner = list(region)
                inner[self.dim] = slice(start - begin, stop - begin)
                yield part, inner
            begin += extent

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``, from those parts alone that it reaches into; contiguous."""
        found = [part.read(inner) for part, inner in self.within(region)]
        if not found:
            return self.parts[0].read([slice(0, 0) if d == self.dim else bounds for d, bounds in enumerate(region)])
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


class Stacked:
    """Other sources of one shape, as the slices along a new dim ``dim``."""

    def __init__(self, parts: Sequence[Source], dim: int):
        self.parts = tuple(parts)
        self.dim = dim

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``, from those parts alone that it reaches into; contiguous."""
        inner = [bounds for d, bounds in enumerate(region) if d != self.dim]
        wanted = self.parts[region[self.dim]]
        if not wanted:
            return self.parts[0].read(inner).unsqueeze(self.dim).narrow(self.dim, 0, 0)
        return torch.stack([part.read(inner) for part in wanted], self.dim)


class Permuted:
    """Another source with its dims in another order: dim d is ``order[d]`` of the other."""

    def __init__(self, inner: Source, order: Sequence[int]):
        self.inner = inner
        self.order = tuple(order)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``; contiguous."""
        places = [self.order.index(d) for d in range(len(self.order))]
        return self.inner.read([region[place] for place in places]).permute(self.order).contiguous()
