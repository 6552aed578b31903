"""The tensor sharding spec: the mesh axes that split each dim of a tensor."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hidet_dist.checks import shown
from hidet_dist.errors import SpecError
from hidet_dist.spec.mesh import DeviceMesh

_DIM = re.compile(r"^(?:R|S(\d+))$")


def _parse_dim(token: str, text: str) -> tuple[int, ...]:
    match = _DIM.match(token)
    if match is None:
        raise SpecError(
            f"Not a tensor sharding spec: {shown(text)} has the dim {shown(token)}. Write (S0, S1, R) or (S01, R)."
        )
    return tuple(int(digit) for digit in match.group(1) or "")


def padded_shard(size: int, axes: Sequence[int], mesh: DeviceMesh) -> int | None:
    """Return the extent of the largest shard of a dim of ``size`` that ``axes`` split; None if the split is impossible.

    A dim that even axes do not divide is padded to the next multiple of the mesh's number of devices; each shard must
    have at least one element that is not padding. A dim that uneven axes split must be a multiple of their parts.
    """
    if mesh.is_uneven(axes):
        return None if size % mesh.parts(axes) else mesh.largest_part(size, axes)
    shards = mesh.group_size(axes)
    if size % shards == 0:
        return size // shards
    local = -(-size // mesh.size) * mesh.size // shards
    return local if (shards - 1) * local < size else None


@dataclass(frozen=True)
class TensorShardSpec:
    """The layout of a tensor on a mesh: ``mesh_axes_per_dim[d]`` are the mesh axes that split dim d, major to minor.

    The written form is ``(S0, S1, R)``. ``(S01, R)`` splits dim 0 by axis 0, and each piece by axis 1. ``R`` marks a
    dim that is not split. A mesh axis that splits no dim replicates the tensor.

    Even mesh axes make shards of equal size. A dim that does not divide may be padded at its end, so that the last
    shards are partly padding; each shard has at least one element of the tensor. Uneven mesh axes (those with shares)
    make shards in proportion to the shares, without padding.

    Raises
    ------
    SpecError
        For a repeated mesh axis, or one outside of 0 to 9.
    """

    mesh_axes_per_dim: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes_per_dim", tuple(tuple(axes) for axes in self.mesh_axes_per_dim))
        used = self.mesh_axes
        if any(isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < 10 for axis in used):
            raise SpecError(f"Mesh axes are whole numbers from 0 to 9; got {self.mesh_axes_per_dim}.")
        if len(set(used)) != len(used):
            raise SpecError(f"A mesh axis can split a tensor only once; got {self.mesh_axes_per_dim}.")

    @classmethod
    def replicated(cls, ndim: int) -> TensorShardSpec:
        """Make the spec of a tensor of ``ndim`` dims that every device holds whole."""
        return cls(((),) * ndim)

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.mesh_axes_per_dim)

    @property
    def mesh_axes(self) -> tuple[int, ...]:
        """All mesh axes that split the tensor, in dim order."""
        return tuple(axis for axes in self.mesh_axes_per_dim for axis in axes)

    @property
    def is_replicated(self) -> bool:
        """True if every device holds the whole tensor."""
        return not self.mesh_axes

    def with_dim(self, dim: int, axes: Sequence[int]) -> TensorShardSpec:
        """Return the spec with dim ``dim`` split by ``axes``."""
        per_dim = list(self.mesh_axes_per_dim)
        per_dim[dim] = tuple(axes)
        return TensorShardSpec(tuple(per_dim))

    def validate(self, shape: Sequence[int], mesh: DeviceMesh, padded: bool = False) -> None:
        """Raise SpecError unless the spec fits a tensor of ``shape`` (elements) on ``mesh``.

        Each dim must divide. With ``padded``, a dim that divides after padding (:meth:`padded_shape`) fits as well; a
        dim that an uneven axis splits is never padded.
        """
        if self.ndim != len(shape):
            raise SpecError(f"The spec {self} is for {self.ndim} dims but the tensor has the shape {tuple(shape)}.")
        self.check_axes(mesh)
        for dim, axes in enumerate(self.mesh_axes_per_dim):
            shards = mesh.parts(axes)
            if not shape[dim] % shards:
                continue
            if not padded or mesh.is_uneven(axes):
                raise SpecError(
                    f"The spec {self} splits dim {dim} of {tuple(shape)} into {shards}, which does not divide it."
                )
            if padded_shard(shape[dim], axes, mesh) is None:
                raise SpecError(
                    f"The spec {self} splits dim {dim} of {tuple(shape)} into {shards}; with padding for the mesh "
                    f"{mesh} some shards would hold only padding."
                )

    def check_axes(self, mesh: DeviceMesh) -> None:
        """Raise SpecError when the spec uses an axis that the mesh does not have."""
        for axis in self.mesh_axes:
            if axis >= mesh.ndim:
                raise SpecError(f"The spec {self} uses the mesh axis {axis} but the mesh {mesh} has {mesh.ndim} axes.")

    def fits(self, shape: Sequence[int], mesh: DeviceMesh, padded: bool = False) -> bool:
        """Tell whether :meth:`validate` accepts the spec."""
        try:
            self.validate(shape, mesh, padded)
        except SpecError:
            return False
        return True

    def num_shards(self, mesh: DeviceMesh) -> int:
        """Return the number of distinct pieces into which the tensor is split."""
        return mesh.group_size(self.mesh_axes)

    def local_shape(
        self, shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the shape of a shard of a tensor of ``shape``, including padding. Raises SpecError for a misfit.

        Shards differ only where uneven axes split the tensor: the shard is that of the device at ``coordinate``, or by
        default as large as the largest shard in each dim.
        """
        largest = _local_shape(self, tuple(shape), mesh)
        if coordinate is None or not mesh.is_uneven(self.mesh_axes):
            return largest
        return tuple(
            mesh.interval(size, axes, coordinate)[1] if mesh.is_uneven(axes) else local
            for size, axes, local in zip(shape, self.mesh_axes_per_dim, largest, strict=True)
        )

    def padded_shape(self, shape: Sequence[int], mesh: DeviceMesh) -> tuple[int, ...]:
        """Return the shape that the shards tile: ``shape`` with padding at the end of dims that do not divide.

        Such a dim is padded to a multiple of the mesh's number of devices, however many axes split it. So a shard of a
        dim split by some axes consists of shards of the same dim split by more axes. Raises SpecError.
        """
        local = self.local_shape(shape, mesh)
        return tuple(
            whole if mesh.is_uneven(axes) else size * mesh.group_size(axes)
            for whole, size, axes in zip(shape, local, self.mesh_axes_per_dim, strict=True)
        )

    def is_padded(self, shape: Sequence[int], mesh: DeviceMesh) -> bool:
        """Tell whether shards of a tensor of ``shape`` have padding. Raises SpecError when the spec does not fit."""
        return self.padded_shape(shape, mesh) != tuple(shape)

    def local_nbytes(
        self, shape: Sequence[int], itemsize: int, mesh: DeviceMesh, coordinate: Sequence[int] | None = None
    ) -> int:
        """Return the bytes of the shard of :meth:`local_shape`; ``itemsize`` is for one element. Raises SpecError."""
        return math.prod(self.local_shape(shape, mesh, coordinate)) * itemsize

    def shard_offset(self, shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the index in the whole tensor at which the shard at ``coordinate`` begins. Raises SpecError."""
        local = self.local_shape(shape, mesh)
        mesh.rank(coordinate)  # refuses a coordinate outside the mesh
        offsets = []
        for whole, size, axes in zip(shape, local, self.mesh_axes_per_dim, strict=True):
            if mesh.is_uneven(axes):
                offsets.append(mesh.interval(whole, axes, coordinate)[0])
                continue
            index = 0
            for axis in axes:
                index = index * mesh.shape[axis] + coordinate[axis]
            offsets.append(index * size)
        return tuple(offsets)

    def slices(self, shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of the whole tensor that the device at ``coordinate`` holds, without padding.

        Raises SpecError when the spec does not fit.
        """
        local = self.local_shape(shape, mesh, coordinate)
        offsets = self.shard_offset(shape, mesh, coordinate)
        return tuple(
            slice(begin, min(begin + size, extent)) for begin, size, extent in zip(offsets, local, shape, strict=True)
        )

    def __str__(self) -> str:
        return "(" + ", ".join("S" + "".join(map(str, axes)) if axes else "R" for axes in self.mesh_axes_per_dim) + ")"

    @classmethod
    def parse(cls, text: str) -> TensorShardSpec:
        """Parse the text that ``str()`` returns for a spec. Raises SpecError for any other text."""
        stripped = text.strip()
        if not (stripped.startswith("(") and stripped.endswith(")")):
            raise SpecError(f"Not a tensor sharding spec: {shown(text)}. Write it as (S0, S1, R).")
        inner = stripped[1:-1].strip()
        if not inner:
            return cls(())
        return cls(tuple(_parse_dim(token.strip(), text) for token in inner.split(",")))


@functools.lru_cache(maxsize=2**14)  # a search asks for the same few shards many times
def _local_shape(spec: TensorShardSpec, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    spec.validate(shape, mesh, padded=True)
    return tuple(padded_shard(size, axes, mesh) or 0 for size, axes in zip(shape, spec.mesh_axes_per_dim, strict=True))
