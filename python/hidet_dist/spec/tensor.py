"""The tensor sharding spec: which mesh axes split which dim."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hidet_dist.errors import SpecError
from hidet_dist.spec.mesh import DeviceMesh

_DIM = re.compile(r"^(?:R|S(\d+))$")


def _parse_dim(token: str, text: str) -> tuple[int, ...]:
    match = _DIM.match(token)
    if match is None:
        raise SpecError(
            f"Not a tensor sharding spec: {text!r} has the dim {token!r}. Write it as (S0, S1, R) or (S01, R)."
        )
    return tuple(int(digit) for digit in match.group(1) or "")


@dataclass(frozen=True)
class TensorShardSpec:
    """How a tensor lies on a mesh: ``mesh_axes_per_dim[d]`` are the mesh axes that split dim d, major to minor.

    Written ``(S0, S1, R)``; ``(S01, R)`` splits dim 0 by axis 0 and each piece by axis 1; ``R`` is not split.

    Raises
    ------
    SpecError
        For a mesh axis used twice or a negative one.
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
        """The spec of a tensor of ``ndim`` dims that every device holds whole."""
        return cls(((),) * ndim)

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.mesh_axes_per_dim)

    @property
    def mesh_axes(self) -> tuple[int, ...]:
        """All mesh axes that split the tensor, in dim order."""
        return tuple(axis for axes in self.mesh_axes_per_dim for axis in axes)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return not self.mesh_axes

    def with_dim(self, dim: int, axes: Sequence[int]) -> TensorShardSpec:
        """The same spec with dim ``dim`` split by ``axes`` instead."""
        per_dim = list(self.mesh_axes_per_dim)
        per_dim[dim] = tuple(axes)
        return TensorShardSpec(tuple(per_dim))

    def validate(self, shape: Sequence[int], mesh: DeviceMesh) -> None:
        """Raise SpecError unless the spec fits a tensor of ``shape`` (elements) on ``mesh`` exactly."""
        if self.ndim != len(shape):
            raise SpecError(f"The spec {self} is for {self.ndim} dims but the tensor has the shape {tuple(shape)}.")
        for axis in self.mesh_axes:
            if axis >= mesh.ndim:
                raise SpecError(f"The spec {self} uses the mesh axis {axis} but the mesh {mesh} has {mesh.ndim} axes.")
        for dim, axes in enumerate(self.mesh_axes_per_dim):
            shards = mesh.group_size(axes)
            if shape[dim] % shards:
                raise SpecError(
                    f"The spec {self} splits dim {dim} of {tuple(shape)} into {shards}, which does not divide it."
                )

    def fits(self, shape: Sequence[int], mesh: DeviceMesh) -> bool:
        """Whether :meth:`validate` accepts the spec."""
        try:
            self.validate(shape, mesh)
        except SpecError:
            return False
        return True

    def num_shards(self, mesh: DeviceMesh) -> int:
        """Into how many different pieces the tensor is split."""
        return mesh.group_size(self.mesh_axes)

    def local_shape(self, shape: Sequence[int], mesh: DeviceMesh) -> tuple[int, ...]:
        """The shape of one shard of a tensor of ``shape``. Raises SpecError when the spec does not fit."""
        self.validate(shape, mesh)
        return tuple(size // mesh.group_size(axes) for size, axes in zip(shape, self.mesh_axes_per_dim, strict=True))

    def shard_offset(self, shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Where, in the whole tensor, the shard of the device at ``coordinate`` begins. Raises SpecError."""
        local = self.local_shape(shape, mesh)
        mesh.rank(coordinate)  # refuses a coordinate outside the mesh
        offsets = []
        for size, axes in zip(local, self.mesh_axes_per_dim, strict=True):
            index = 0
            for axis in axes:
                index = index * mesh.shape[axis] + coordinate[axis]
            offsets.append(index * size)
        return tuple(offsets)

    def slices(self, shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int]) -> tuple[slice, ...]:
        """The slices that cut the shard of the device at ``coordinate`` out of the whole tensor. Raises SpecError."""
        local = self.local_shape(shape, mesh)
        offsets = self.shard_offset(shape, mesh, coordinate)
        return tuple(slice(begin, begin + size) for begin, size in zip(offsets, local, strict=True))

    def __str__(self) -> str:
        return "(" + ", ".join("S" + "".join(map(str, axes)) if axes else "R" for axes in self.mesh_axes_per_dim) + ")"

    @classmethod
    def parse(cls, text: str) -> TensorShardSpec:
        """The spec that ``str()`` printed. Raises SpecError for anything else."""
        stripped = text.strip()
        if not (stripped.startswith("(") and stripped.endswith(")")):
            raise SpecError(f"Not a tensor sharding spec: {text!r}. Write it as (S0, S1, R).")
        inner = stripped[1:-1].strip()
        if not inner:
            return cls(())
        return cls(tuple(_parse_dim(token.strip(), text) for token in inner.split(",")))
