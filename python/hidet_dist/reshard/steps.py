"""Steps of conversions: the effect of each step on a layout, and the steps that apply to a layout."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hidet_dist.errors import SpecError
from hidet_dist.spec import DeviceMesh, ReduceFn, TensorShardSpec
from hidet_dist.spec.collectives import COLLECTIVES, EXTREMES, Collective
from hidet_dist.spec.operator import REDUCE_OPS
from hidet_dist.spec.partial import Layout, PartialSpec, partial_axes, split_of, with_partial
from hidet_dist.spec.parts import AXES, Parts, Split, axes_text, normal_parts, parse_axes
from hidet_dist.spec.tensor import padded_shard

_STEP = re.compile(
    rf"^(\w+)\((?:([a-z]+),\s*)?axes=({AXES})(?:,\s*dim=(\d+))?(?:,\s*to_dim=(\d+))?(?:,\s*to_axes=({AXES}))?\)$"
)

Offered: TypeAlias = Parts
"""Parts that steps may split a dim into, besides the mesh's shares: an axis may have several."""


@dataclass(frozen=True)
class Step:
    """One collective, or a slice, over ``mesh_axes``.

    ===================================== ==============================================================================
    ``slice(axes=01, dim=0)``             each device keeps its part of dim 0, split further by axes 0, then 1; local
    ``all_gather(axes=1, dim=0)``         axis 1, the minor-most axis of dim 0, no longer splits it
    ``all_to_all(axes=1, dim=0,           axis 1, the minor-most axis of dim 0, splits dim 1 instead, minor-most there;
    to_dim=1)``                           ``to_axes`` gives the order in which several axes arrive, and the parts into
                                          which they split that dim, if they differ
    ``reduce_scatter(sum, axes=1, dim=0)`` partial sums are added, and axis 1 splits dim 0 further
    ``all_reduce(sum, axes=1)``           partial sums are added
    ===================================== ==============================================================================

    Axes are in the order in which they split the dim, major to minor. ``kind`` is the name of one of ``COLLECTIVES``.
    ``parts`` are the parts of the dim that it joins or splits, by axis, where they are not the mesh's shares:
    ``slice(axes=0[5,4], dim=0)``. Where it joins one and splits another, ``to_parts`` are those of the other.

    Raises
    ------
    SpecError
        For an unknown kind, missing or repeated mesh axes, and fields that the kind lacks or must not have.
    """

    kind: str
    mesh_axes: tuple[int, ...]
    dim: int | None = None
    to_dim: int | None = None
    to_axes: tuple[int, ...] = ()
    op: str = ""
    parts: Parts = ()
    to_parts: Parts = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes", tuple(self.mesh_axes))
        object.__setattr__(self, "to_axes", tuple(self.to_axes))
        if self.kind not in COLLECTIVES:
            raise SpecError(f"A step is one of {', '.join(COLLECTIVES)}; got {self.kind!r}.")
        kind = self.collective
        has_dim, moves = kind.has_dim, kind.moves
        if self.parts:
            object.__setattr__(self, "parts", normal_parts(self.parts, self.mesh_axes))
            if not has_dim:
                raise SpecError(f"The step {self} has parts, and {self.kind} takes none.")
        if self.to_parts:
            object.__setattr__(self, "to_parts", normal_parts(self.to_parts, self.mesh_axes))
            if not moves:
                raise SpecError(f"The step {self} has parts of a dim to move to, and {self.kind} takes none.")
        if moves and not self.to_axes:
            object.__setattr__(self, "to_axes", self.mesh_axes)
        self._check(kind)

    def _check(self, kind: Collective) -> None:
        """Raise SpecError for axes, dims or a reduction that do not fit the kind."""
        has_dim, moves, reduces = kind.has_dim, kind.moves, kind.reduces
        if not self.mesh_axes or len(set(self.mesh_axes)) != len(self.mesh_axes):
            raise SpecError(f"The step {self} needs distinct mesh axes.")
        if (self.dim is not None, self.to_dim is not None) != (has_dim, moves) or (self.to_axes and not moves):
            takes = "dim and to_dim" if moves else "dim" if has_dim else "no dim"
            raise SpecError(f"The step {self} has wrong dims: {self.kind} takes {takes}.")
        if moves and (self.dim == self.to_dim or sorted(self.to_axes) != sorted(self.mesh_axes)):
            raise SpecError(f"The step {self} must move the same mesh axes from one dim to another.")
        if (self.op in REDUCE_OPS) != reduces or (self.op and not reduces):
            takes = f"one of {', '.join(REDUCE_OPS)}" if reduces else "no reduction"
            raise SpecError(f"The step {self} has a wrong reduction {self.op!r}: {self.kind} takes {takes}.")

    @property
    def collective(self) -> Collective:
        """The collective of the step's kind."""
        return COLLECTIVES[self.kind]

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """The dims that it joins or splits."""
        return tuple(dim for dim in (self.dim, self.to_dim) if dim is not None)

    @classmethod
    def of(cls, fn: ReduceFn) -> Step:
        """Make the step of a reduce function."""
        return cls(fn.kind, fn.mesh_axes, fn.dim, op=fn.op, parts=fn.parts)

    def after(self, layout: Layout, shape: Sequence[int], mesh: DeviceMesh) -> Layout:
        """Return the layout of a tensor of ``shape`` (whole) after the step. Raises SpecError if it does not apply."""
        result = self._after(layout)
        check_step(self, layout, result, shape, mesh)
        return result

    def _after(self, layout: Layout) -> Layout:
        kind, spec, partial = self.collective, split_of(layout), partial_axes(layout)
        for dim in self.dims:
            if dim >= spec.ndim:
                raise SpecError(f"The step {self} does not apply to {layout}: it has no dim {dim}.")
        if self.op:
            if not isinstance(layout, PartialSpec) or not set(self.mesh_axes) <= set(partial) or self.op != layout.op:
                raise SpecError(
                    f"The step {self} does not apply to {layout}: it is not partial over these axes by this op."
                )
            partial = tuple(axis for axis in partial if axis not in self.mesh_axes)
        elif not kind.joins and set(self.mesh_axes) & {*spec.mesh_axes, *partial}:
            raise SpecError(f"The step {self} does not apply to {layout}: the mesh axes are in use.")
        if kind.joins:
            assert self.dim is not None
            has = spec.mesh_axes_per_dim[self.dim]
            if has[-len(self.mesh_axes) :] != self.mesh_axes:
                raise SpecError(f"The step {self} does not apply to {layout}: other mesh axes are minor-most there.")
            if self.parts != _parts_of(self.mesh_axes, spec.parts):
                raise SpecError(f"The step {self} does not apply to {layout}: the parts there are others.")
            spec = spec.with_dim(self.dim, has[: -len(self.mesh_axes)])
        if kind.splits:
            dim, axes = self.split
            spec = spec.with_dim(
                dim, (*spec.mesh_axes_per_dim[dim], *axes), self.to_parts if kind.moves else self.parts
            )
        return with_partial(spec, layout.op if isinstance(layout, PartialSpec) else "", partial)

    @property
    def split(self) -> tuple[int, tuple[int, ...]]:
        """The dim that is split further, and by which mesh axes, of a kind that splits one."""
        dim, axes = (self.to_dim, self.to_axes) if self.collective.moves else (self.dim, self.mesh_axes)
        assert dim is not None
        return dim, axes

    def received_nbytes(self, sent: int, result: int, mesh: DeviceMesh) -> int:
        """Return the bytes that a rank receives, given those of its tensor before the step and after it.

        Gathered data includes padding, which is cut off afterwards.
        """
        kind = self.collective
        return kind.whole(sent, mesh.group_size(self.mesh_axes)) if kind.joins and not kind.splits else result

    def exchanges(self, places_shards: bool) -> bool:
        """Tell whether ranks exchange their partial results, and reduce them by a kernel.

        NCCL's maxima and minima drop NaN. Collectives in host memory, which ``places_shards``, keep it.
        """
        return self.op in EXTREMES and not places_shards

    def exchanged_nbytes(self, sent: int, received: int, mesh: DeviceMesh) -> int:
        """Return the bytes of the partial results that a rank receives to reduce, given those of its tensor before
        the step and after it."""
        kind, ranks = self.collective, mesh.group_size(self.mesh_axes)
        if kind.splits and self.is_uneven(mesh):
            return received * ranks
        return kind.exchange.received(self.whole_nbytes(sent, mesh) * ranks, ranks)

    def joined(self, mesh: DeviceMesh) -> Split | None:
        """Return the parts of the dim that it joins; None if it joins none."""
        return Split.of(mesh, self.mesh_axes, self.parts) if self.collective.joins else None

    def divided(self, mesh: DeviceMesh) -> Split | None:
        """Return the parts of the dim that it splits; None if it splits none."""
        if not self.collective.splits:
            return None
        return Split.of(mesh, self.split[1], self.to_parts if self.collective.moves else self.parts)

    def is_uneven(self, mesh: DeviceMesh) -> bool:
        """Tell whether it joins parts of unequal size, or splits a dim into such."""
        if not (self.parts or self.to_parts or mesh.shares):
            return False
        return any(split is not None and not split.is_even for split in (self.joined(mesh), self.divided(mesh)))

    def whole_nbytes(self, sent: int, mesh: DeviceMesh) -> int:
        """Return the bytes of the tensor within a group, given those of the largest shard before the step."""
        joined = self.joined(mesh) if self.is_uneven(mesh) else None
        if joined is not None:
            return sent * joined.units // joined.largest(joined.units)
        return self.collective.whole(sent, mesh.group_size(self.mesh_axes))

    def packs(self, local_shape: Sequence[int], mesh: DeviceMesh, places_shards: bool = False) -> bool:
        """Tell whether a tensor of ``local_shape`` must be copied into the order of group ranks before it is sent.

        A device that ``places_shards`` sends equal parts of any dim as they are, if the axes are in ascending order.
        """
        if not self.collective.sends_blocks:
            return False
        dim, axes = self.split
        return not _in_order(axes, 0 if places_shards and not self.is_uneven(mesh) else dim, local_shape)

    def unpacks(
        self, local_shape: Sequence[int], result_shape: Sequence[int], mesh: DeviceMesh, places_shards: bool = False
    ) -> bool:
        """Tell whether the received data of a tensor of ``local_shape`` must be copied out of the order of group ranks.

        Cutting off padding needs a copy as well: ``result_shape`` is the local shape after the step. A device that
        ``places_shards`` writes equal parts to their positions, without padding, if the axes are in ascending order.
        """
        kind = self.collective
        if not kind.receives_blocks:
            return False
        assert self.dim is not None
        if self.is_uneven(mesh):
            return not _in_order(self.mesh_axes, self.dim, result_shape)
        if places_shards:
            return not _in_order(self.mesh_axes, 0, local_shape)
        if not kind.splits:
            cut = result_shape[self.dim] != local_shape[self.dim] * mesh.group_size(self.mesh_axes)
            return cut or not _in_order(self.mesh_axes, self.dim, local_shape)
        part = list(local_shape)
        part[self.split[0]] //= mesh.group_size(self.mesh_axes)
        return not _in_order(self.mesh_axes, self.dim, part)

    def __str__(self) -> str:
        written = [self.op] if self.op else []
        written.append(f"axes={axes_text(self.mesh_axes, self.parts)}")
        if self.dim is not None:
            written.append(f"dim={self.dim}")
        if self.to_dim is not None:
            written.append(f"to_dim={self.to_dim}")
        if self.to_axes and (self.to_axes, self.to_parts) != (self.mesh_axes, self.parts):
            written.append(f"to_axes={axes_text(self.to_axes, self.to_parts)}")
        return f"{self.kind}({', '.join(written)})"

    @classmethod
    def parse(cls, text: str) -> Step:
        """Parse the text that ``str()`` returns for a step. Raises SpecError for any other text."""
        match = _STEP.match(text.strip())
        if match is None:
            raise SpecError(f"Not a step: {text!r}. Write it as all_gather(axes=0, dim=1).")
        kind, op, axes, dim, to_dim, to_axes = match.groups()
        mesh_axes, parts = parse_axes(axes)
        to = parse_axes(to_axes) if to_axes is not None else (mesh_axes, parts) if to_dim is not None else ((), ())
        return cls(
            kind,
            mesh_axes,
            None if dim is None else int(dim),
            None if to_dim is None else int(to_dim),
            to[0],
            op or "",
            parts,
            to[1],
        )


def _parts_of(mesh_axes: Sequence[int], parts: Parts) -> Parts:
    """Select the parts of some mesh axes."""
    return tuple((axis, of_axis) for axis, of_axis in parts if axis in mesh_axes)


def _in_order(mesh_axes: tuple[int, ...], dim: int | None, shape: Sequence[int]) -> bool:
    """Tell whether the parts of a tensor along ``dim`` are contiguous in memory, in the order of group ranks.

    Group ranks are row-major over ascending mesh axes, whatever the order in which the axes split a dim.
    """
    ascending = len(mesh_axes) == 1 or all(a < b for a, b in itertools.pairwise(mesh_axes))
    return ascending and math.prod(shape[:dim]) == 1


def check_step(step: Step, layout: Layout, result: Layout, shape: Sequence[int], mesh: DeviceMesh) -> None:
    """Raise SpecError unless the step can take a tensor of ``shape`` from ``layout`` to ``result``.

    Slicing a whole dim that does not divide pads it. Gathering all of a dim cuts its padding off. No other step may
    change the padding.
    """
    for fits in (layout, result):
        fits.validate(shape, mesh, padded=True)
    tilings = _Tilings(shape, mesh)
    for dim in step.dims:
        if not tilings.keep_padding(step, split_of(layout), split_of(result), dim):
            raise SpecError(f"The step {step} would change the padding of dim {dim} of {tuple(shape)}.")


class _Tiling(NamedTuple):
    """The extent of the largest shard of a dim, and the extent that the shards tile: that of the dim with padding."""

    local: int
    padded: int


class _Tilings:
    """The tilings of the dims of a tensor of ``shape``, each of which is computed once."""

    def __init__(self, shape: Sequence[int], mesh: DeviceMesh):
        self._shape, self._mesh = tuple(shape), mesh
        self._known: dict[tuple[int, tuple[int, ...], Parts], _Tiling | None] = {}

    def of(self, dim: int, spec: TensorShardSpec) -> _Tiling | None:
        """Return the tiling of dim ``dim`` in ``spec``; None where the dim cannot be split so."""
        key = dim, spec.mesh_axes_per_dim[dim], spec.parts
        try:
            return self._known[key]
        except KeyError:
            _, axes, parts = key
            size, mesh = self._shape[dim], self._mesh
            local = padded_shard(size, axes, mesh, parts)
            tiled = size if local is None or not spec.is_even(dim, mesh) else local * mesh.group_size(axes)
            return self._known.setdefault(key, None if local is None else _Tiling(local, tiled))

    def local_shape(self, spec: TensorShardSpec) -> tuple[int, ...]:
        """Return the shape of the largest shard in a spec that fits."""
        tilings = [self.of(dim, spec) for dim in range(spec.ndim)]
        return tuple(tiling.local for tiling in tilings if tiling is not None)

    def keep_padding(self, step: Step, before: TensorShardSpec, after: TensorShardSpec, dim: int) -> bool:
        """Tell whether ``after`` can tile dim ``dim``, with the padding of ``before``, which can, or as the step may.

        A step may pad a whole dim by slicing it, and cut the padding off by gathering all of it.
        """
        if self._shape[dim] % self._mesh.size == 0 and not (self._mesh.shares or before.parts or after.parts):
            return True  # a dim that the devices divide is never padded
        old, new = self.of(dim, before), self.of(dim, after)
        if old is None or new is None:
            return False
        if old.padded == new.padded:
            return True
        kind = step.collective
        if not kind.communicates:
            return not before.mesh_axes_per_dim[dim]
        return kind.joins and not kind.splits and not after.mesh_axes_per_dim[dim]


def walk(steps: Iterable[Step], source: Layout, shape: Sequence[int], mesh: DeviceMesh) -> list[Layout]:
    """List the layouts of a tensor of ``shape`` after each step from ``source``. Raises SpecError for a misfit."""
    layouts = []
    for step in steps:
        source = step.after(source, shape, mesh)
        layouts.append(source)
    return layouts


def moves(
    layout: Layout, shape: Sequence[int], mesh: DeviceMesh, usable: Sequence[int] | None = None, offered: Offered = ()
) -> Iterator[tuple[Step, Layout]]:
    """Yield every step that applies to a layout of a tensor of ``shape``, and its result, in a fixed order.

    ``usable`` are the mesh axes by which a step may split the tensor further; all axes by default. They split it in the
    mesh's shares, or in parts that are ``offered``. Raises SpecError when the layout does not fit.
    """
    layout.validate(shape, mesh, padded=True)
    yield from StepMoves(shape, mesh, usable, offered)(layout)


class StepMoves:
    """The steps of :func:`moves` for layouts of one tensor.

    A layout that fits and a step of it are checked by what the step changes: the dims that it joins and splits.
    """

    def __init__(
        self, shape: Sequence[int], mesh: DeviceMesh, usable: Sequence[int] | None = None, offered: Offered = ()
    ):
        self._mesh = mesh
        self._usable = tuple(range(mesh.ndim) if usable is None else usable)
        self._offered = offered
        self._tilings = _Tilings(shape, mesh)

    def __call__(self, layout: Layout) -> Iterator[tuple[Step, Layout]]:
        """Yield every step that applies to a layout that fits, and its result, in a fixed order."""
        before, keeps = split_of(layout), self._tilings.keep_padding
        for step, result in _candidates(layout, self._usable, self._offered):
            after = split_of(result)
            if all(keeps(step, before, after, dim) for dim in step.dims):
                yield step, result

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of the largest shard in a layout that fits."""
        return self._tilings.local_shape(split_of(layout))


_SPLITTING = [kind for kind in COLLECTIVES.values() if kind.splits and not kind.joins]
_JOINING = [kind for kind in COLLECTIVES.values() if kind.joins and not kind.splits]
_MOVING = [kind for kind in COLLECTIVES.values() if kind.moves]
_REDUCING = [kind for kind in COLLECTIVES.values() if kind.reduces and not kind.splits]


@functools.lru_cache(maxsize=2**13)
def _candidates(layout: Layout, usable: tuple[int, ...], offered: Offered) -> tuple[tuple[Step, Layout], ...]:
    """The steps of :func:`moves` before shapes are checked; they are the same for all shapes."""
    spec, partial = split_of(layout), partial_axes(layout)
    op = layout.op if isinstance(layout, PartialSpec) else ""
    free = [axis for axis in usable if axis not in spec.mesh_axes and axis not in partial]
    steps = []
    for dim in range(spec.ndim):
        for kind in _SPLITTING:
            split_by, own_op = (partial, op) if kind.reduces else (tuple(free), "")
            steps += [
                Step(kind.name, axes, dim, op=own_op, parts=parts)
                for axes in _ordered_choices(split_by)
                for parts in _offered_parts(axes, offered)
            ]
        has = spec.mesh_axes_per_dim[dim]
        for kept in range(len(has)):
            axes = has[kept:]
            parts = _parts_of(axes, spec.parts)
            steps += [Step(kind.name, axes, dim, parts=parts) for kind in _JOINING]
            for to_dim, kind in itertools.product(range(spec.ndim), _MOVING):
                if to_dim != dim:
                    steps += [
                        Step(kind.name, axes, dim, to_dim, order, parts=parts, to_parts=to_parts)
                        for order in itertools.permutations(axes)
                        for to_parts in _offered_parts(axes, offered)
                    ]
    for count, kind in itertools.product(range(1, len(partial) + 1), _REDUCING):
        steps += [Step(kind.name, axes, op=op) for axes in itertools.combinations(partial, count)]
    return tuple((step, step._after(layout)) for step in steps)


def _offered_parts(axes: Sequence[int], offered: Offered) -> Iterator[Parts]:
    """Yield the parts in which axes may split a dim: each in the mesh's shares, or in parts that are offered."""
    own = [[(), *((pair,) for pair in offered if pair[0] == axis)] for axis in sorted(axes)]
    for chosen in itertools.product(*own):
        yield tuple(pair for pairs in chosen for pair in pairs)


def _ordered_choices(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.permutations(axes, count)
