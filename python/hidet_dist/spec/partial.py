"""The spec of a tensor whose devices hold partial results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hidet_dist.errors import SpecError
from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.operator import REDUCE_OPS
from hidet_dist.spec.tensor import TensorShardSpec


@dataclass(frozen=True)
class PartialSpec:
    """A tensor in ``spec`` whose devices along ``mesh_axes`` hold partial results, to be reduced by ``op``.

    Written ``(S0, R) partial(sum, axes=1)``. There is one op, since reductions by different ops do not commute.
    ``mesh_axes`` are kept in ascending order.

    Raises
    ------
    SpecError
        For an unknown op, no mesh axis, a repeated one, or one that also splits the tensor.
    """

    spec: TensorShardSpec
    op: str
    mesh_axes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes", tuple(sorted(self.mesh_axes)))
        if self.op not in REDUCE_OPS:
            raise SpecError(f"A partial tensor is reduced by one of {', '.join(REDUCE_OPS)}; got {self.op!r}.")
        if not self.mesh_axes or len(set(self.mesh_axes)) != len(self.mesh_axes):
            raise SpecError(f"A partial tensor is partial over distinct mesh axes; got {self.mesh_axes}.")
        if set(self.mesh_axes) & set(self.spec.mesh_axes):
            raise SpecError(f"A mesh axis cannot both split a tensor and hold partial results of it; got {self}.")

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return self.spec.ndim

    def validate(self, shape: Sequence[int], mesh: DeviceMesh, padded: bool = False) -> None:
        """Raise SpecError unless it fits a tensor of ``shape`` (elements) on ``mesh``, after padding if ``padded``."""
        self.spec.validate(shape, mesh, padded)
        if self.mesh_axes[0] < 0 or self.mesh_axes[-1] >= mesh.ndim:
            raise SpecError(f"The spec {self} uses the mesh axis {self.mesh_axes[-1]}; the mesh {mesh} lacks it.")

    def __str__(self) -> str:
        return f"{self.spec} partial({self.op}, axes={''.join(map(str, self.mesh_axes))})"


Layout: TypeAlias = TensorShardSpec | PartialSpec
"""The layout of a tensor on a mesh, reduced or partial."""


def split_of(layout: Layout) -> TensorShardSpec:
    """Return the spec of a layout, without the partial results."""
    return layout.spec if isinstance(layout, PartialSpec) else layout


def partial_axes(layout: Layout) -> tuple[int, ...]:
    """Return the mesh axes over which the devices hold partial results."""
    return layout.mesh_axes if isinstance(layout, PartialSpec) else ()


def with_partial(spec: TensorShardSpec, op: str, mesh_axes: Sequence[int]) -> Layout:
    """Make the layout ``spec``, partial over ``mesh_axes`` if there are any."""
    return PartialSpec(spec, op, tuple(mesh_axes)) if mesh_axes else spec
