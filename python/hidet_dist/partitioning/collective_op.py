"""The base of operators that all ranks of a group run together."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TypeAlias

import hidet
import numpy as np
from hidet.graph import Tensor
from hidet.ir.dtypes import int64

from hidet_dist.compat.native_call import NativeCallOp
from hidet_dist.spec.collectives import Collective
from hidet_dist.spec.extents import Extent

Reduce: TypeAlias = Callable[[Sequence[np.ndarray]], np.ndarray]
"""A reduction of the ranks' arrays to one, by the operator's ``reduce_op``."""


class CollectiveOp(NativeCallOp, abc.ABC):
    """An operator over the ranks that differ only along some mesh axes; a barrier to fusion.

    Attributes
    ----------
    kind: str
        Its name in the text of a program.
    mesh_axes: tuple of int
        The mesh axes that the group spans.
    group_size: int
        The number of ranks in the group.
    collective: Collective
        The kind of collective whose cost it has.
    reduce_op: str
        The reduction of what the ranks send; empty where nothing is reduced.
    can_start: bool
        Whether it can only be started, and be waited for later, while other operators run.
    can_be_captured: bool
        Whether a CUDA graph can contain it.
    only_starts: bool
        Whether it is only started; a :class:`WaitOp` precedes its first reader.
    """

    kind: str
    mesh_axes: tuple[int, ...]
    group_size: int
    collective: Collective
    reduce_op: str
    can_start: bool = False
    can_be_captured: bool = True
    only_starts: bool = False

    @abc.abstractmethod
    def whole_nbytes(self, sent_nbytes: int) -> int:
        """Count the bytes of the whole tensor within the group whose collective keeps its ranks as busy as this one.

        ``sent_nbytes`` are those of the local tensor.
        """

    @abc.abstractmethod
    def result(self, inputs: Sequence[Sequence[np.ndarray]], group_rank: int, reduce: Reduce) -> np.ndarray:
        """Compute what one rank of the group receives, by the definition of the operator.

        Parameters
        ----------
        inputs: sequence of sequences
            The operator's inputs on each rank of the group, by group rank.
        group_rank: int
            The group rank of the receiver.
        reduce: Callable
            Reduces arrays of one shape to one, by ``reduce_op``.
        """

    def run(self) -> list[Tensor]:
        """Never communicate while a graph is built, not even constants, which hidet would compute at once."""
        outputs: list[Tensor] = self.symbolic_run()
        return outputs

    @property
    def description(self) -> str:
        """Describe the communication in one line of text."""
        reduction = f"{self.reduce_op}, " if self.reduce_op else ""
        shapes = (f"[{', '.join(map(str, x.shape))}]" for x in (self.inputs[0], self.outputs[0]))
        axes = "".join(map(str, self.mesh_axes))
        return f"{self.kind}({reduction}axes={axes}) {self.inputs[0].dtype.name}{' -> '.join(shapes)}"


def product_of(extents: Sequence[Extent]) -> Extent:
    """Return the product of extents as an int64: an expression where one is symbolic."""
    product: Extent = hidet.utils.prod([int64(1), *map(int64, extents)])
    return product
