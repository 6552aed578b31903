"""The sizes of symbolic dims in the calls of a pipeline.

A rank knows a size if its stage reads an input of the graph that has the symbolic dim. It gets the other sizes from the
stage before, in a message at the begin of each call, and compares those that it knows. Before a call, all ranks agree
on the sizes that they know (:mod:`hidet_dist.runtime.agreement`); within a stream, only the ranks of a stage do, so
that stages need not wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hidet_dist import native
from hidet_dist.artifacts.manifest import ProgramManifest
from hidet_dist.errors import InputError
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import Memory
from hidet_dist.spec.pipeline import Pipeline
from hidet_dist.spec.symbols import micro_sizes

_ALL_RANKS = 1  # the mask of the one axis of the mesh of all ranks
_SIZES = native.dtype_code("int64")


class Sizes:
    """The sizes of symbolic dims on one rank of a pipeline.

    Parameters
    ----------
    manifest: ProgramManifest
        The manifest of the program, with a pipeline.
    rank: int
        The rank, among those of all stages.
    """

    def __init__(self, manifest: ProgramManifest, rank: int):
        assert manifest.pipeline is not None
        number = manifest.stage_of(rank)
        self._symbols = manifest.stages[number].symbols
        self._names = [symbol.name for symbol in self._symbols]
        self._count = manifest.pipeline.micro_batches
        self._batch = batch_symbol(manifest, manifest.pipeline)
        own = manifest.ranks_of(number)
        self._rank, self._size = rank, len(own)
        # One rank of each stage sends the sizes to all ranks of the next stage.
        self._source = manifest.ranks_of(number - 1).start if number else None
        sends = rank == own.start and number + 1 < len(manifest.stages)
        self._targets = manifest.ranks_of(number + 1) if sends else range(0)

    @property
    def planned(self) -> dict[str, int]:
        """The sizes of a call that the plan was made for."""
        whole = {symbol.name: symbol.size for symbol in self._symbols}
        if self._batch is not None:
            whole[self._batch] *= self._count
        return whole

    def complete(self, sizes: Mapping[str, int]) -> bool:
        """Whether these are the sizes of all symbolic dims."""
        return all(name in sizes for name in self._names)

    def of_micro_batches(self, sizes: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the sizes in each micro-batch of a call with these ``sizes``; there are fewer of a small batch."""
        ordered = {name: sizes[name] for name in self._names}
        if self._batch is None:
            return [ordered] * self._count
        multiple_of = next(symbol.multiple_of for symbol in self._symbols if symbol.name == self._batch)
        parts = micro_sizes(sizes[self._batch], multiple_of, self._count)
        return [{**ordered, self._batch: part} for part in parts]

    def exchange(
        self, known: Mapping[str, int], world: Communicator, own: Communicator, memory: Memory, agreed: bool
    ) -> dict[str, int]:
        """Return the sizes of a call, and pass them on to the next stage.

        Parameters
        ----------
        known: mapping
            The sizes that this rank knows from its inputs.
        world, own: Communicator
            The communicators of all ranks and of the stage's ranks.
        memory: Memory
            The memory whose all-gather compares the sizes of the stage's ranks.
        agreed: bool
            Whether all ranks have agreed on the known sizes before.

        Raises
        ------
        InputError
            When the size of a symbolic dim is not the same on all ranks.
        CommunicationError
            When a message or a collective failed.
        """
        row = np.array([known.get(name, 0) for name in self._names], np.int64)
        if not agreed and self._size > 1:
            own.bind()
            self._check(row, *memory.all_gather(own, row))
        world.bind()
        if self._source is not None:
            received = np.empty_like(row)
            native.recv(received.ctypes.data, received.size, _SIZES, self._source, _ALL_RANKS)
            world.check()
            self._check(row, received)
            row = np.maximum(row, received)
        for target in self._targets:
            native.send(row.ctypes.data, row.size, _SIZES, target, _ALL_RANKS)
            world.check()
        return {name: int(size) for name, size in zip(self._names, row, strict=True) if size}

    def _check(self, row: np.ndarray, *others: np.ndarray) -> None:
        for other in others:
            for name, here, there in zip(self._names, row, other, strict=True):
                if here and there and here != there:
                    raise InputError(
                        f"The symbolic dim {name} must be the same on all ranks; it is {here} on rank {self._rank} but "
                        f"{there} on another."
                    )


def batch_symbol(manifest: ProgramManifest, pipeline: Pipeline) -> str | None:
    """Return the symbolic dim that micro-batches split; None if the batch has a fixed size, or is not split."""
    for x in pipeline.inputs:
        if x.batch_dim is not None and x.readers:
            reader = x.readers[0]
            extent = manifest.stages[reader.stage].inputs[reader.number].whole_shape[x.batch_dim]
            return extent if isinstance(extent, str) else None
    return None
