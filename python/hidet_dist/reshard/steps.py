"""The steps of a conversion: what each does to how a tensor lies, and which steps there are from a layout."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hidet_dist.errors import SpecError
from hidet_dist.spec import DeviceMesh, ReduceFn
from hidet_dist.spec.operator import REDUCE_OPS
from hidet_dist.spec.partial import Layout, PartialSpec, partial_axes, split_of, with_partial

_STEP = re.compile(
    r"^(\w+)\((?:([a-z]+),\s*)?axes=(\d+)(?:,\s*dim=(\d+))?(?:,\s*to_dim=(\d+))?(?:,\s*to_axes=(\d+))?\)$"
)
# For each kind of step whether it names a dim, a dim to move to, and a reduce op.
_FIELDS = {
    "slice": (True, False, False),
    "all_gather": (True, False, False),
    "all_to_all": (True, True, False),
    "reduce_scatter": (True, False, True),
    "all_reduce": (False, False, True),
}


@dataclass(frozen=True)
class Step:
    """One collective, or a slice, over ``mesh_axes``.

    ===================================== ==============================================================================
    ``slice(axes=01, dim=0)``             each device keeps its part of dim 0, which 0 and then 1 split further; local
    ``all_gather(axes=1, dim=0)``         dim 0 is no longer split by axis 1, the last of those that split it
    ``all_to_all(axes=1, dim=0,           axis 1, the last of those that split dim 0, splits dim 1 instead, as the last
    to_dim=1)``                           there; ``to_axes`` where several axes arrive in another order
    ``reduce_scatter(sum, axes=1, dim=0)`` partial sums are added, and axis 1 splits dim 0 further
    ``all_reduce(sum, axes=1)``           partial sums are added
    ===================================== ==============================================================================

    Axes are in the order in which they split the dim, major to minor.

    Raises
    ------
    SpecError
        For an unknown kind, mesh axes that are none or not distinct, and what the kind has or lacks.
    """

    kind: str
    mesh_axes: tuple[int, ...]
    dim: int | None = None
    to_dim: int | None = None
    to_axes: tuple[int, ...] = ()
    op: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes", tuple(self.mesh_axes))
        object.__setattr__(self, "to_axes", tuple(self.to_axes))
        if self.kind not in _FIELDS:
            raise SpecError(f"A step is one of {', '.join(_FIELDS)}; got {self.kind!r}.")
        has_dim, moves, reduces = _FIELDS[self.kind]
        if moves and not self.to_axes:
            object.__setattr__(self, "to_axes", self.mesh_axes)
        if not self.mesh_axes or len(set(self.mesh_axes)) != len(self.mesh_axes):
            raise SpecError(f"The step {self} needs distinct mesh axes.")
        if (self.dim is not None, self.to_dim is not None) != (has_dim, moves) or (self.to_axes and not moves):
            raise SpecError(f"The step {self} names a dim too many, or one too few.")
        if moves and (self.dim == self.to_dim or sorted(self.to_axes) != sorted(self.mesh_axes)):
            raise SpecError(f"The step {self} moves mesh axes from one dim to another.")
        if (self.op in REDUCE_OPS) != reduces or (self.op and not reduces):
            raise SpecError(f"The step {self} reduces by one of {', '.join(REDUCE_OPS)}, or not at all.")

    @classmethod
    def of(cls, fn: ReduceFn) -> Step:
        """A reduce function as a step."""
        return cls(fn.kind, fn.mesh_axes, fn.dim, op=fn.op)

    def after(self, layout: Layout, shape: Sequence[int], mesh: DeviceMesh) -> Layout:
        """How a tensor of ``shape`` (whole) lies after the step. Raises SpecError where the step cannot be taken."""
        result = self._after(layout)
        check_step(self, layout, result, shape, mesh)
        return result

    def _after(self, layout: Layout) -> Layout:
        spec, partial = split_of(layout), partial_axes(layout)
        for dim in (self.dim, self.to_dim):
            if dim is not None and dim >= spec.ndim:
                raise SpecError(f"The step {self} names the dim {dim} of {layout}.")
        if self.op:
            if not isinstance(layout, PartialSpec) or not set(self.mesh_axes) <= set(partial) or self.op != layout.op:
                raise SpecError(f"The step {self} does not apply to {layout}: it is not so partial.")
            partial = tuple(axis for axis in partial if axis not in self.mesh_axes)
        elif self.kind == "slice" and set(self.mesh_axes) & {*spec.mesh_axes, *partial}:
            raise SpecError(f"The step {self} does not apply to {layout}: the mesh axes are in use.")
        if self.kind in ("all_gather", "all_to_all"):
            assert self.dim is not None
            has = spec.mesh_axes_per_dim[self.dim]
            if has[-len(self.mesh_axes) :] != self.mesh_axes:
                raise SpecError(f"The step {self} does not apply to {layout}: the last mesh axes there are others.")
            spec = spec.with_dim(self.dim, has[: -len(self.mesh_axes)])
        if self.kind == "all_to_all":
            assert self.to_dim is not None
            spec = spec.with_dim(self.to_dim, (*spec.mesh_axes_per_dim[self.to_dim], *self.to_axes))
        elif self.kind in ("slice", "reduce_scatter"):
            assert self.dim is not None
            spec = spec.with_dim(self.dim, (*spec.mesh_axes_per_dim[self.dim], *self.mesh_axes))
        return with_partial(spec, layout.op if isinstance(layout, PartialSpec) else "", partial)

    def packs(self, local_shape: Sequence[int]) -> bool:
        """Whether a tensor of ``local_shape`` must be copied into the group's order before it is sent."""
        if self.kind == "reduce_scatter":
            return not _in_order(self.mesh_axes, self.dim, local_shape)
        return self.kind == "all_to_all" and not _in_order(self.to_axes, self.to_dim, local_shape)

    def unpacks(self, local_shape: Sequence[int], result_shape: Sequence[int], mesh: DeviceMesh) -> bool:
        """Whether what is received for a tensor of ``local_shape`` must be copied out of the group's order.

        Or off the padding, where ``result_shape``, the local shape after the step, ends before it.
        """
        if self.kind == "all_gather":
            assert self.dim is not None
            cut = result_shape[self.dim] != local_shape[self.dim] * mesh.group_size(self.mesh_axes)
            return cut or not _in_order(self.mesh_axes, self.dim, local_shape)
        if self.kind != "all_to_all":
            return False
        assert self.to_dim is not None
        part = list(local_shape)
        part[self.to_dim] //= mesh.group_size(self.mesh_axes)
        return not _in_order(self.mesh_axes, self.dim, part)

    def __str__(self) -> str:
        written = [self.op] if self.op else []
        written.append(f"axes={''.join(map(str, self.mesh_axes))}")
        if self.dim is not None:
            written.append(f"dim={self.dim}")
        if self.to_dim is not None:
            written.append(f"to_dim={self.to_dim}")
        if self.to_axes not in ((), self.mesh_axes):
            written.append(f"to_axes={''.join(map(str, self.to_axes))}")
        return f"{self.kind}({', '.join(written)})"

    @classmethod
    def parse(cls, text: str) -> Step:
        """The step that ``str()`` printed. Raises SpecError for anything else."""
        match = _STEP.match(text.strip())
        if match is None:
            raise SpecError(f"Not a step: {text!r}. Write it as all_gather(axes=0, dim=1).")
        kind, op, axes, dim, to_dim, to_axes = match.groups()
        return cls(
            kind,
            tuple(map(int, axes)),
            None if dim is None else int(dim),
            None if to_dim is None else int(to_dim),
            tuple(map(int, to_axes or "")),
            op or "",
        )


def _in_order(mesh_axes: tuple[int, ...], dim: int | None, shape: Sequence[int]) -> bool:
    """Whether the parts of a tensor along ``dim`` lie in memory one behind the other, in the group's order.

    A group numbers its ranks row-major over ascending mesh axes, whatever the order in which they split a dim.
    """
    return all(a < b for a, b in itertools.pairwise(mesh_axes)) and math.prod(shape[:dim]) == 1


def check_step(step: Step, layout: Layout, result: Layout, shape: Sequence[int], mesh: DeviceMesh) -> None:
    """Raise SpecError unless the step can take a tensor of ``shape`` from ``layout`` to ``result``.

    A dim that does not divide is padded by slicing it when it is whole, and its padding is cut off where all of it is
    gathered. Every other step leaves the padding as it is: it is none where that would change it.
    """
    result.validate(shape, mesh, padded=True)
    for dim in (step.dim, step.to_dim):
        if dim is None:
            continue
        before, after = (split_of(lies).mesh_axes_per_dim[dim] for lies in (layout, result))
        if shape[dim] % mesh.group_size(before) == shape[dim] % mesh.group_size(after) == 0:
            continue
        if (step.kind == "slice" and not before) or (step.kind == "all_gather" and not after):
            continue
        if split_of(layout).padded_shape(shape, mesh)[dim] != split_of(result).padded_shape(shape, mesh)[dim]:
            raise SpecError(f"The step {step} would change the padding of dim {dim} of {tuple(shape)}.")


def walk(steps: Iterable[Step], source: Layout, shape: Sequence[int], mesh: DeviceMesh) -> list[Layout]:
    """How a tensor of ``shape`` that lies as ``source`` lies after each step. Raises SpecError where one fails."""
    layouts = []
    for step in steps:
        source = step.after(source, shape, mesh)
        layouts.append(source)
    return layouts


def moves(
    layout: Layout, shape: Sequence[int], mesh: DeviceMesh, usable: Sequence[int] | None = None
) -> Iterator[tuple[Step, Layout]]:
    """Every step that can be taken from a layout of a tensor of ``shape``, and where it leads, in a fixed order.

    ``usable`` are the mesh axes by which a step may split a tensor that is whole along them; all when not given.
    """
    for step, result in _candidates(layout, tuple(range(mesh.ndim) if usable is None else usable)):
        try:
            check_step(step, layout, result, shape, mesh)
        except SpecError:
            continue
        yield step, result


@functools.lru_cache(maxsize=2**13)
def _candidates(layout: Layout, usable: tuple[int, ...]) -> tuple[tuple[Step, Layout], ...]:
    """The steps of :func:`moves`, whether the results fit or not: these are the same for all shapes."""
    spec, partial = split_of(layout), partial_axes(layout)
    op = layout.op if isinstance(layout, PartialSpec) else ""
    free = [axis for axis in usable if axis not in spec.mesh_axes and axis not in partial]
    steps = []
    for dim in range(spec.ndim):
        steps += [Step("slice", axes, dim) for axes in _ordered_choices(free)]
        steps += [Step("reduce_scatter", axes, dim, op=op) for axes in _ordered_choices(partial)]
        has = spec.mesh_axes_per_dim[dim]
        for kept in range(len(has)):
            axes = has[kept:]
            steps.append(Step("all_gather", axes, dim))
            for to_dim in range(spec.ndim):
                if to_dim != dim:
                    steps += [Step("all_to_all", axes, dim, to_dim, order) for order in itertools.permutations(axes)]
    for count in range(1, len(partial) + 1):
        steps += [Step("all_reduce", axes, op=op) for axes in itertools.combinations(partial, count)]
    return tuple((step, step._after(layout)) for step in steps)


def _ordered_choices(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.permutations(axes, count)
