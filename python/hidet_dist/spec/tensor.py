"""The tensor sharding spec: the mesh axes that split each dim of a tensor."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hidet_dist.checks import shown
from hidet_dist.errors import SpecError
from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.parts import AXES, Parts, Split, axes_text, check_parts, normal_parts, parse_axes

_DIM = re.compile(rf"^(?:R|S({AXES}))$")
_COMMA = re.compile(r",(?![^\[]*\])")  # one that is not within brackets


def _parse_dim(token: str, text: str) -> tuple[tuple[int, ...], Parts]:
    match = _DIM.match(token)
    if match is None:
        raise SpecError(
            f"Not a tensor sharding spec: {shown(text)} has the dim {shown(token)}. Write (S0, S1, R), (S01, R) or "
            "(S0[5,4], R)."
        )
    return parse_axes(match[1] or "")


def padded_shard(size: int, axes: Sequence[int], mesh: DeviceMesh, parts: Parts = ()) -> int | None:
    """Return the extent of the largest shard of a dim of ``size`` that ``axes`` split; None if the split is impossible.

    A dim that an even split does not divide is padded to the next multiple of the mesh's number of devices; each shard
    must have at least one element that is not padding. A dim with unequal parts must be a multiple of their units.
    """
    if parts or mesh.shares:
        split = Split.of(mesh, axes, parts)
        if not split.is_even:
            return None if size % split.units else split.largest(size)
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

    Each coordinate of an axis has a part of the dim. The parts are those in ``parts``, by axis: ``(S0[5,4], R)`` gives
    coordinate 0 five units and coordinate 1 four, of nine into which the dim is divided. Other axes have the shares of
    the mesh, which are equal unless it says otherwise. Where all parts are equal, a dim that does not divide may be
    padded at its end, so that the last shards are partly padding; each shard has at least one element of the tensor.
    Unequal parts are never padded.

    Raises
    ------
    SpecError
        For a repeated mesh axis, or one outside of 0 to 9, and for parts that are not whole numbers from 1.
    """

    mesh_axes_per_dim: tuple[tuple[int, ...], ...]
    parts: Parts = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes_per_dim", tuple(tuple(axes) for axes in self.mesh_axes_per_dim))
        used = self.mesh_axes
        if self.parts:
            object.__setattr__(self, "parts", normal_parts(self.parts, used))
        if any(isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < 10 for axis in used):
            raise SpecError(f"Mesh axes are whole numbers from 0 to 9; got {self.mesh_axes_per_dim}.")
        if len(set(used)) != len(used):
            raise SpecError(f"A mesh axis can split a tensor only once; got {self.mesh_axes_per_dim}.")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a search looks up each spec many times
        return hash((self.mesh_axes_per_dim, self.parts))

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

    def with_dim(self, dim: int, axes: Sequence[int], parts: Parts = ()) -> TensorShardSpec:
        """Return the spec with dim ``dim`` split by ``axes``, those of which in ``parts`` have these parts."""
        per_dim = list(self.mesh_axes_per_dim)
        per_dim[dim] = tuple(axes)
        return TensorShardSpec(tuple(per_dim), (*self.parts, *parts))

    def split(self, dim: int, mesh: DeviceMesh) -> Split:
        """Return the parts into which dim ``dim`` is split."""
        return Split.of(mesh, self.mesh_axes_per_dim[dim], self.parts)

    def is_even(self, dim: int, mesh: DeviceMesh) -> bool:
        """Tell whether all parts of dim ``dim`` are equal."""
        return not (self.parts or mesh.shares) or self.split(dim, mesh).is_even

    def units(self, dim: int, mesh: DeviceMesh) -> int:
        """Return the number of whole units into which dim ``dim`` is split."""
        if self.parts or mesh.shares:
            return self.split(dim, mesh).units
        return mesh.group_size(self.mesh_axes_per_dim[dim])

    def has_equal_shards(self, mesh: DeviceMesh) -> bool:
        """Tell whether all devices hold shards of one shape."""
        return not (self.parts or mesh.shares) or all(self.is_even(dim, mesh) for dim in range(self.ndim))

    def symbols(self, mesh: DeviceMesh) -> dict[str, int]:
        """Map the names of the symbols of unequal parts to their largest values."""
        if not (self.parts or mesh.shares):
            return {}
        return {name: most for dim in range(self.ndim) for name, most in self.split(dim, mesh).symbols(mesh).items()}

    def validate(self, shape: Sequence[int], mesh: DeviceMesh, padded: bool = False) -> None:
        """Raise SpecError unless the spec fits a tensor of ``shape`` (elements) on ``mesh``.

        Each dim must divide. With ``padded``, a dim that divides after padding (:meth:`padded_shape`) fits as well; a
        dim that an uneven axis splits is never padded.
        """
        if self.ndim != len(shape):
            raise SpecError(f"The spec {self} is for {self.ndim} dims but the tensor has the shape {tuple(shape)}.")
        self.check_axes(mesh)
        for dim, axes in enumerate(self.mesh_axes_per_dim):
            shards = self.units(dim, mesh)
            if not shape[dim] % shards:
                continue
            if not padded or not self.is_even(dim, mesh):
                raise SpecError(
                    f"The spec {self} splits dim {dim} of {tuple(shape)} into {shards}, which does not divide it."
                )
            if padded_shard(shape[dim], axes, mesh, self.parts) is None:
                raise SpecError(
                    f"The spec {self} splits dim {dim} of {tuple(shape)} into {shards}; with padding for the mesh "
                    f"{mesh} some shards would hold only padding."
                )

    def check_axes(self, mesh: DeviceMesh) -> None:
        """Raise SpecError when the spec uses an axis that the mesh does not have, or parts that do not fit it."""
        for axis in self.mesh_axes:
            if axis >= mesh.ndim:
                raise SpecError(f"The spec {self} uses the mesh axis {axis} but the mesh {mesh} has {mesh.ndim} axes.")
        check_parts(self.parts, mesh, f"The spec {self}")

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

        Shards differ only where parts are unequal: the shard is that of the device at ``coordinate``, or by default as
        large as the largest shard in each dim.
        """
        largest = _local_shape(self, tuple(shape), mesh)
        if coordinate is None or self.has_equal_shards(mesh):
            return largest
        return tuple(
            local if self.is_even(dim, mesh) else self.split(dim, mesh).interval(size, coordinate)[1]
            for dim, (size, local) in enumerate(zip(shape, largest, strict=True))
        )

    def padded_shape(self, shape: Sequence[int], mesh: DeviceMesh) -> tuple[int, ...]:
        """Return the shape that the shards tile: ``shape`` with padding at the end of dims that do not divide.

        Such a dim is padded to a multiple of the mesh's number of devices, however many axes split it. So a shard of a
        dim split by some axes consists of shards of the same dim split by more axes. Raises SpecError.
        """
        local = self.local_shape(shape, mesh)
        return tuple(
            size * mesh.group_size(axes) if self.is_even(dim, mesh) else whole
            for dim, (whole, size, axes) in enumerate(zip(shape, local, self.mesh_axes_per_dim, strict=True))
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
        for dim, (whole, size, axes) in enumerate(zip(shape, local, self.mesh_axes_per_dim, strict=True)):
            if not self.is_even(dim, mesh):
                offsets.append(self.split(dim, mesh).interval(whole, coordinate)[0])
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
        dims = ("S" + axes_text(axes, self.parts) if axes else "R" for axes in self.mesh_axes_per_dim)
        return "(" + ", ".join(dims) + ")"

    @classmethod
    def parse(cls, text: str) -> TensorShardSpec:
        """Parse the text that ``str()`` returns for a spec. Raises SpecError for any other text."""
        stripped = text.strip()
        if not (stripped.startswith("(") and stripped.endswith(")")):
            raise SpecError(f"Not a tensor sharding spec: {shown(text)}. Write it as (S0, S1, R).")
        inner = stripped[1:-1].strip()
        if not inner:
            return cls(())
        dims = [_parse_dim(token.strip(), text) for token in dims_of(inner)]
        return cls(tuple(axes for axes, _ in dims), tuple(part for _, parts in dims for part in parts))


def dims_of(text: str) -> list[str]:
    """Split the text of a spec, without its parentheses, into those of its dims."""
    return _COMMA.split(text)


@functools.lru_cache(maxsize=2**14)  # a search asks for the same few shards many times
def _local_shape(spec: TensorShardSpec, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    spec.validate(shape, mesh, padded=True)
    return tuple(
        padded_shard(size, axes, mesh, spec.parts) or 0
        for size, axes in zip(shape, spec.mesh_axes_per_dim, strict=True)
    )
