"""The steps of a conversion, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hidet_dist.machine import Cluster
from hidet_dist.spec import ReduceFn, TensorShardSpec


@dataclass(frozen=True)
class Step:
    """``all_gather`` or ``slice`` of ``dim`` over ``mesh_axes`` (major to minor); ``result`` is the spec after it."""

    kind: str
    mesh_axes: tuple[int, ...]
    dim: int
    result: TensorShardSpec

    def __str__(self) -> str:
        return f"{self.kind}(axes={''.join(map(str, self.mesh_axes))}, dim={self.dim})"


@dataclass(frozen=True)
class Connection:
    """The steps from one spec to another, and their predicted time in seconds."""

    source: TensorShardSpec
    target: TensorShardSpec
    steps: tuple[Step, ...]
    seconds: float


def connect(
    shape: Sequence[int], itemsize: int, source: TensorShardSpec, target: TensorShardSpec, cluster: Cluster
) -> Connection:
    """Convert a tensor of ``shape`` (elements of ``itemsize`` bytes) from ``source`` to ``target``.

    What the two specs do not share is gathered, minor axes first, and then sliced away; the gathering goes first only
    where it must, so that nothing is gathered that a slice would drop.

    Raises
    ------
    SpecError
        When a spec does not fit the shape or the mesh.
    """
    mesh = cluster.mesh
    source.validate(shape, mesh, padded=True)
    target.validate(shape, mesh, padded=True)
    steps: list[Step] = []
    seconds = 0.0
    spec = source

    def nbytes() -> int:
        return spec.local_nbytes(shape, itemsize, mesh)

    def padded(dim: int, axes: tuple[int, ...]) -> int:
        return TensorShardSpec.replicated(len(shape)).with_dim(dim, axes).padded_shape(shape, mesh)[dim]

    def nested(dim: int, axes: tuple[int, ...], within: tuple[int, ...]) -> bool:
        return not within or padded(dim, axes) == padded(dim, within)

    def slices() -> None:
        nonlocal spec, seconds
        for dim, wanted in enumerate(target.mesh_axes_per_dim):
            has = spec.mesh_axes_per_dim[dim]
            more = wanted[len(has) :]
            if more and wanted[: len(has)] == has and not set(more) & set(spec.mesh_axes) and nested(dim, wanted, has):
                spec = spec.with_dim(dim, wanted)
                steps.append(Step("slice", more, dim, spec))
                seconds += cluster.copy_seconds(nbytes())

    slices()
    for dim, wanted in enumerate(target.mesh_axes_per_dim):
        has = spec.mesh_axes_per_dim[dim]
        kept = 0
        while kept < min(len(has), len(wanted)) and has[kept] == wanted[kept]:
            kept += 1
        if not (nested(dim, has, has[:kept]) and nested(dim, wanted, wanted[:kept])):
            kept = 0
        while len(has) > kept:
            # One collective serves a run of axes that ascend, as a group numbers its ranks in that order.
            run = 1
            while len(has) - run > kept and has[-run - 1] < has[-run]:
                run += 1
            # The pad goes with the last axes.
            if not nested(dim, has, has[:-run]):
                run = len(has)
            axes, has = has[-run:], has[:-run]
            spec = spec.with_dim(dim, has)
            steps.append(Step("all_gather", axes, dim, spec))
            seconds += cluster.all_gather_seconds(nbytes(), axes)
            if dim:
                seconds += cluster.copy_seconds(nbytes())
    slices()
    assert spec == target
    return Connection(source, target, tuple(steps), seconds)


def reduce_seconds(
    shape: Sequence[int], itemsize: int, partial: TensorShardSpec, fns: Sequence[ReduceFn], cluster: Cluster
) -> float:
    """Predicted time of applying ``fns`` to a partial tensor of ``shape`` (whole) that lies as ``partial`` says."""
    seconds = 0.0
    spec = partial
    for fn in fns:
        nbytes = spec.local_nbytes(shape, itemsize, cluster.mesh)
        if fn.dim is None:
            seconds += cluster.all_reduce_seconds(nbytes, fn.mesh_axes)
        else:
            seconds += cluster.reduce_scatter_seconds(nbytes, fn.mesh_axes)
            if fn.dim:
                seconds += cluster.copy_seconds(nbytes)
            spec = spec.with_dim(fn.dim, (*spec.mesh_axes_per_dim[fn.dim], *fn.mesh_axes))
    return seconds
