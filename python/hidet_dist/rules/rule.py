"""Sharding rules of operators, and their choices, each proven on the local operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import hidet
from hidet.graph import Operator
from hidet.ir.expr import Expr

from hidet_dist.errors import SpecError
from hidet_dist.rules.access import Definition, Digit, UnsupportedDefinition, analyze, rename
from hidet_dist.rules.declared import REPLICATED, definition_of
from hidet_dist.rules.local import localize, plain_attributes, rebuild
from hidet_dist.rules.lookup import row_axes, row_dim, row_factor
from hidet_dist.rules.padding import paddable
from hidet_dist.rules.routing import routed_work
from hidet_dist.rules.templates import formal_shape, pattern, proofs_of
from hidet_dist.spec import DeviceMesh, Dispatch, OpShardSpec, ReduceFn, TensorShardSpec
from hidet_dist.spec.collectives import REDUCING_WHOLE, SCATTERING
from hidet_dist.spec.extents import Extent, extent_text, part_shape
from hidet_dist.spec.parts import Parts, Split, part_sizes
from hidet_dist.spec.tensor import padded_shard
from hidet_dist.traits import Dims, Routed, Updates, routed_of, traits_of
from hidet_dist.weights.storage import shard_nbytes, storage_of

Layout = tuple[tuple[Digit, ...] | None, ...]


@dataclass(frozen=True)
class OfferedParts:
    """The parts in which mesh axes may split factors and dims, besides the mesh's shares.

    Attributes
    ----------
    parts: pairs of an axis and its parts; an axis may have several.
    extents: the extents for which each of them is offered; None for all that are multiples of its units.
    """

    parts: Parts = ()
    extents: tuple[frozenset[int] | None, ...] = ()

    def of(self, axis: int, extent: int, scatters: bool = False) -> tuple[Parts, ...]:
        """List the parts in which an axis may split an extent: none of its own first.

        Partial results are scattered (``scatters``) only in parts that are offered for all extents: those of heads are
        for operators that compute whole heads, which no reduction follows.
        """
        if not self.parts:
            return ((),)
        fitting = (
            ((other, parts),)
            for (other, parts), extents in zip(self.parts, self.extents, strict=True)
            if other == axis and extent % sum(parts) == 0
            if extents is None or (extent in extents and not scatters)
        )
        return ((), *fitting)


NO_PARTS = OfferedParts()
"""No parts but the mesh's shares."""

_ShardShape = TypeVar("_ShardShape")
# Attributes that kernels need as numbers.
_NUMBERS = ("groups", "repeats")


@dataclass(frozen=True)
class Choice:
    """One way to shard an operator: its spec, and the work of each device.

    ``operations`` counts the scalar operations of the compute definition, ``functions`` those of them that are
    functions such as exp. ``read_bytes`` and ``written_bytes`` are the least bytes that the local operator moves.

    Where the parts of devices are unequal, these figures are those of the largest shards, and ``devices`` has the
    choice with the work of a device at each ``coordinate`` that differs from others (:func:`unlike_coordinates`).
    """

    spec: OpShardSpec
    operations: int
    read_bytes: int
    written_bytes: int
    functions: int = 0
    coordinate: tuple[int, ...] | None = None
    devices: tuple[Choice, ...] = ()

    def reduced_otherwise(self, spec: OpShardSpec) -> Choice:
        """Return the choice with the same work whose outputs are reduced in another way, to those of ``spec``."""
        return replace(self, spec=spec, devices=tuple(replace(one, spec=spec) for one in self.devices))


@dataclass
class Rule:
    """The sharding rule of one operator instance.

    Attributes
    ----------
    op: the operator.
    definition: its analysed definition, or None when it has no rule.
    in_layouts, out_layouts: for each tensor and dim, the digits that index it, major to minor; None if the dim cannot
        be sharded.
    factors: the digits that may be sharded, those of reductions last.
    reduce_ops: for each reduction digit, the outputs that become partial and the op that reduces them.
    paddable: the digits that may be sharded, with padding, even if they do not divide.
    note: the reason why the operator has no rule; empty if it has one.
    """

    op: Operator
    definition: Definition | None
    in_layouts: tuple[Layout, ...] = ()
    out_layouts: tuple[Layout, ...] = ()
    factors: tuple[Digit, ...] = ()
    reduce_ops: Mapping[Digit, tuple[tuple[int, str], ...]] = None  # type: ignore[assignment]
    paddable: frozenset[Digit] = frozenset()
    note: str = ""

    @cached_property
    def _counted(self) -> Dims | None:
        counted = traits_of(self.op).counted_dims
        return None if counted is None else counted(self.op)

    @cached_property
    def _has_numbers(self) -> bool:
        """Whether the operator has an attribute that kernels need as a number, which may follow from extents."""
        return any(name in self.op.attrs for name in _NUMBERS)

    @cached_property
    def _proofs(self) -> dict[Hashable, bool]:
        """What is proven of shards, on any mesh: by their shapes and the extents of sharded digits, or by patterns."""
        return {} if self._counted is None else proofs_of(self.op)

    @cached_property
    def _digits(self) -> tuple[Digit, ...]:
        """The digits that index dims."""
        dims = (dim for layout in (*self.in_layouts, *self.out_layouts) for dim in layout)
        return tuple(sorted({digit for dim in dims for digit in dim or ()}))

    def notation(self) -> str:
        """Format the rule in Shardy's notation: ``([i,k],[k,j])->([i,j]) {i=8,j=16,k=32} reduction={k}``.

        A dim of several factors lists them major to minor (``hd``); a dim that must stay whole is ``*``.
        """
        if self.definition is None:
            return f"replicated: {self.note}"
        digits = sorted({d for tensor in self.out_layouts + self.in_layouts for dim in tensor for d in dim or ()})
        names = dict(zip(digits, _letters(), strict=False))

        def tensor(layout: Layout) -> str:
            return "[" + ",".join("*" if dim is None else "".join(names[d] for d in dim) or "1" for dim in layout) + "]"

        ins, outs = (f"({','.join(map(tensor, side))})" for side in (self.in_layouts, self.out_layouts))
        text = f"{ins}->{outs} {{{','.join(f'{names[d]}={d.extent}' for d in digits)}}}"
        reduction = [names[d] for d in digits if d in self.reduce_ops]
        whole = [names[d] for d in digits if d not in self.factors]
        text += f" reduction={{{','.join(reduction)}}}" if reduction else ""
        return text + (f" whole={{{','.join(whole)}}}" if whole else "")

    def choices(self, mesh: DeviceMesh, offered: OfferedParts = NO_PARTS) -> tuple[Choice, ...]:
        """List all choices on a mesh, the replicated one first; each is proven to compute the same on shards.

        Besides the mesh's shares, axes split in parts that are ``offered``.
        """
        by_spec: dict[OpShardSpec, Choice] = {}
        proofs: dict[Hashable, bool] = {}  # a proof depends on numbers of shards, not on axes
        # Mesh axes of one device are not assigned.
        options = [
            [
                (None, ()),
                *((digit, parts) for digit in self.factors for parts in offered.of(axis, digit.extent)),
            ]
            if size > 1
            else [(None, ())]
            for axis, size in enumerate(mesh.shape)
        ]
        for assignment in itertools.product(*options):
            shards: dict[Digit, tuple[int, ...]] = {}
            for axis, (digit, _) in enumerate(assignment):
                if digit is not None:
                    shards[digit] = (*shards.get(digit, ()), axis)
            parts = tuple(pair for _, pairs in assignment for pair in pairs)
            for choice in self._assigned(mesh, shards, proofs, parts=parts, offered=offered):
                by_spec.setdefault(choice.spec, choice)
        return self._with_dispatches(by_spec.values(), mesh)

    def replicated_choice(self, mesh: DeviceMesh) -> Choice:
        """Return the choice that computes everything on each device."""
        (choice,) = self._assigned(mesh, {}, None)
        return choice

    def joint_choices(self, mesh: DeviceMesh, proven: bool = True) -> tuple[Choice, ...]:
        """List the choices in which neighbouring mesh axes split one factor together, the replicated one first.

        They are as many axes as the factor allows, and other axes split another factor. Partial outputs are reduced
        over all axes of a factor at once. Factors with partial outputs are also split by fewer axes, beside another
        factor. There are few such choices whatever the mesh, and plans of nearly the least memory need no others.

        If not ``proven``, it remains to prove those that are taken (:meth:`choice`).
        """
        by_spec: dict[OpShardSpec, Choice] = {}
        proofs: dict[Hashable, bool] | None = {} if proven else None
        done: set[Hashable] = set()

        def add(choices: Iterable[Choice]) -> bool:
            found = tuple(choices)
            for choice in found:
                by_spec.setdefault(choice.spec, choice)
            return bool(found)

        axes = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1)
        lengths = range(len(axes), 0, -1)
        runs = [axes[begin : begin + length] for length in lengths for begin in range(len(axes) - length + 1)]
        add(self._assigned(mesh, {}, proofs))
        for factor in self.factors:
            longest = 0
            for run in runs:
                if len(run) >= longest and add(self._joint(mesh, {factor: run}, proofs)):
                    longest = len(run)
                if len(run) == longest or factor in self.reduce_ops:
                    for split in self._completed(mesh, factor, run):
                        # The order matters only where the partial outputs of both factors are reduced.
                        key = (
                            tuple(split.items()) if split.keys() <= self.reduce_ops.keys() else frozenset(split.items())
                        )
                        if key not in done:
                            done.add(key)
                            add(self._joint(mesh, split, proofs))
        return self._with_dispatches(by_spec.values(), mesh)

    def _with_dispatches(self, choices: Iterable[Choice], mesh: DeviceMesh) -> tuple[Choice, ...]:
        """Add, behind each choice that splits experts, the one in which ranks exchange tokens, if there is one."""
        routed = routed_of(self.op)
        if routed is None or routed.last is None:
            return tuple(choices)
        both = ((choice, self._dispatched(choice, routed, mesh)) for choice in choices)
        return tuple(one for pair in both for one in pair if one is not None)

    def _dispatched(self, choice: Choice, routed: Routed, mesh: DeviceMesh) -> Choice | None:
        """Return the choice whose ranks exchange tokens instead of gathering and scattering all of them.

        The local operator is the same, on the tokens of all ranks. Those without an expert on a device may be left out:
        their rows there are zeros.
        """
        spec = choice.spec
        fn = spec.reduce_fns[0][0] if spec.reduce_fns[0] else None
        axes = spec.in_specs[routed.labels].mesh_axes_per_dim[0]
        scatters = fn is not None and (fn.op, fn.dim, fn.mesh_axes) == ("sum", 0, axes)
        has_parts = mesh.is_uneven() or any(one.parts for one in (*spec.in_specs, *spec.out_specs))
        if not scatters or has_parts or list(axes) != sorted(axes):
            return None
        tokens = self.in_layouts[routed.chosen][0]
        if not tokens or self.out_layouts[0][0] != tokens:
            return None
        inputs = tuple(number for number, layout in enumerate(self.in_layouts) if layout and layout[0] == tokens)
        dispatched = spec.dispatched(Dispatch(inputs, axes))
        whole, _ = self._shapes
        if any(dispatched.in_specs[number].is_padded(whole[number], mesh) for number in inputs):
            return None
        return choice.reduced_otherwise(dispatched)

    def _joint(
        self, mesh: DeviceMesh, axes: Mapping[Digit, tuple[int, ...]], proofs: dict[Hashable, bool] | None
    ) -> Iterator[Choice]:
        """Yield the choices of an assignment of mesh axes to factors, reduced over all axes of a factor at once."""
        ways: list[list[tuple[ReduceFn, ...]]] = [[()] for _ in self.op.outputs]
        for factor, of_factor in axes.items():
            for output, op in self.reduce_ops.get(factor, ()):
                dims = range(len(self.op.outputs[output].shape))
                each = [
                    *(ReduceFn(kind, op, of_factor) for kind in REDUCING_WHOLE),
                    *(ReduceFn(kind, op, of_factor, dim) for kind in SCATTERING for dim in dims),
                ]
                ways[output] = [(*before, fn) for before in ways[output] for fn in each]
        for fns in itertools.product(*ways):
            yield from self._assigned(mesh, axes, proofs, fns)

    def _completed(
        self, mesh: DeviceMesh, factor: Digit, run: tuple[int, ...]
    ) -> Iterator[dict[Digit, tuple[int, ...]]]:
        """Yield the assignments of some mesh axes to a factor, and of all others to another one."""
        others = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1 and axis not in run)
        for other in self.factors if others else ():
            if other != factor:
                yield {factor: run, other: others}

    def choice(self, spec: OpShardSpec, mesh: DeviceMesh) -> Choice | None:
        """Derive the choice with this ``spec``, without all others; None if the rule does not prove it.

        It is one of :meth:`choices`, up to the order of mesh axes that share a factor, and up to the number of reduce
        functions into which the same reductions are divided.

        A mesh axis that is assigned to a factor splits exactly the dims that the factor indexes. So the dims that an
        axis splits determine its factor. The spec that the rule derives from these factors is compared with ``spec``.
        """
        if spec.dispatch is not None:
            routed, plain = routed_of(self.op), self.choice(spec.local, mesh)
            dispatched = None if routed is None or plain is None else self._dispatched(plain, routed, mesh)
            return dispatched if dispatched is not None and dispatched.spec == spec else None
        partial = _partial_specs(spec)
        tensors = (*self.in_layouts, *self.out_layouts)
        if partial is None or (len(spec.in_specs), len(partial)) != (len(self.in_layouts), len(self.out_layouts)):
            return None
        specs = (*spec.in_specs, *partial)
        parts = tuple(sorted({pair for tensor_spec in specs for pair in tensor_spec.parts}))
        if len(dict(parts)) < len(parts):  # an axis splits a factor in one way
            return None
        if any(tensor_spec.ndim != len(layout) for tensor_spec, layout in zip(specs, tensors, strict=True)):
            return None
        splits = _split_by_axis(specs)
        if any(axis >= mesh.ndim or mesh.shape[axis] == 1 for axis in splits):
            return None
        indexed = {digit: _indexed_by(digit, tensors) for digit in self.factors}
        candidates = [[digit for digit in self.factors if indexed[digit] == where] for where in splits.values()]
        proofs: dict[Hashable, bool] = {}
        for assignment in itertools.product(*candidates):
            shards: dict[Digit, tuple[int, ...]] = {}
            for axis, digit in zip(splits, assignment, strict=True):  # axes in the order of the first dim they split
                shards[digit] = (*shards.get(digit, ()), axis)
            for choice in self._assigned(mesh, shards, proofs, spec.reduce_fns, parts):
                if choice.spec == spec:
                    return choice
        return None

    def _assigned(
        self,
        mesh: DeviceMesh,
        axes: Mapping[Digit, tuple[int, ...]],
        proofs: dict[Hashable, bool] | None,
        reduce_fns: Sequence[tuple[ReduceFn, ...]] | None = None,
        parts: Parts = (),
        offered: OfferedParts = NO_PARTS,
    ) -> Iterator[Choice]:
        """Yield the choices of an assignment of mesh axes to factors, one for each way to reduce partial outputs.

        Without ``proofs``, which are those known so far, the choices are not proven. The axes split in ``parts``,
        others in the mesh's shares. With ``reduce_fns``, one tuple per output, only the choice with these reduce
        functions; else those that scatter in the mesh's shares or in parts that are ``offered``.
        """
        sharded = self._sharded(mesh, axes, parts)
        if sharded is None:
            return
        extents, splits = sharded
        ins = [_spec(layout, axes, extents, parts) for layout in self.in_layouts]
        outs = [_spec(layout, axes, extents, parts) for layout in self.out_layouts]
        if any(spec is None for spec in (*ins, *outs)):
            return
        in_specs = tuple(spec for spec in ins if spec is not None)
        partial = tuple(spec for spec in outs if spec is not None)
        if extents and proofs is not None:
            key: Hashable = (frozenset(axes.items()), parts) if splits else frozenset(extents.items())
            if key not in proofs:
                proofs[key] = self._proven_on_all(mesh, in_specs, partial, extents, splits)
            if not proofs[key]:
                return
        per_output = [
            self._reductions(i, out_spec, mesh, axes, None if reduce_fns is None else reduce_fns[i], offered)
            for i, out_spec in enumerate(partial)
        ]
        first: Choice | None = None
        for combination in itertools.product(*per_output):
            spec = OpShardSpec(in_specs, tuple(s for s, _ in combination), tuple(fns for _, fns in combination))
            if first is None:
                first = self._choice(mesh, spec, partial, extents, splits)
            yield first.reduced_otherwise(spec)

    def _sharded(
        self, mesh: DeviceMesh, axes: Mapping[Digit, tuple[int, ...]], parts: Parts
    ) -> tuple[dict[Digit, int], dict[Digit, Split]] | None:
        """Compute the extent of each sharded digit on a device, with padding, and the splits of unequal parts.

        None if the axes do not split their digits.
        """
        extents = {}
        splits: dict[Digit, Split] = {}
        for digit, digit_axes in axes.items():
            extent = padded_shard(digit.extent, digit_axes, mesh, parts)
            if extent is None:
                return None
            units = mesh.group_size(digit_axes)
            if parts or mesh.shares:
                split = Split.of(mesh, digit_axes, parts)
                units = split.units
                if not split.is_even:
                    splits[digit] = split
            if digit.extent % units and digit not in self.paddable:
                return None
            # The average of the averages of unequal parts is another number.
            if digit in splits and any(op == "average" for _, op in self.reduce_ops.get(digit, ())):
                return None
            extents[digit] = extent
        return extents, splits

    def _reductions(
        self,
        output: int,
        partial: TensorShardSpec,
        mesh: DeviceMesh,
        axes: Mapping[Digit, tuple[int, ...]],
        reduce_fns: tuple[ReduceFn, ...] | None,
        offered: OfferedParts,
    ) -> list[tuple[TensorShardSpec, tuple[ReduceFn, ...]]]:
        """List the ways to reduce an output that is partial in this spec; the one of ``reduce_fns``, if given."""
        shape = self._shape(self.op.outputs[output])
        reduced_axes = [
            (axis, op)
            for digit, digit_axes in axes.items()
            for number, op in self.reduce_ops.get(digit, ())
            for axis in digit_axes
            if number == output
        ]
        if reduce_fns is None:
            return _reduced(partial, shape, mesh, reduced_axes, offered)
        reduced = _reduced_by(partial, shape, mesh, reduced_axes, reduce_fns)
        return [] if reduced is None else [(reduced, reduce_fns)]

    def _shape(self, tensor: hidet.Tensor) -> tuple[int, ...]:
        return tuple(int(size) for size in tensor.shape)

    @cached_property
    def _shapes(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """The shapes of the inputs and of the outputs."""
        return tuple(map(self._shape, self.op.inputs)), tuple(map(self._shape, self.op.outputs))

    def _of_shards(
        self,
        shape_of: Callable[[tuple[int, ...], TensorShardSpec], _ShardShape],
        in_specs: Sequence[TensorShardSpec],
        partial: Sequence[TensorShardSpec],
    ) -> tuple[tuple[_ShardShape, ...], tuple[_ShardShape, ...]]:
        """Return the shapes of the shards of inputs and outputs, each from the whole shape and the spec."""
        ins, outs = (
            tuple([shape_of(shape, spec) for shape, spec in zip(shapes, specs, strict=True)])
            for shapes, specs in zip(self._shapes, (in_specs, partial), strict=True)
        )
        return ins, outs

    def _shard_shapes(
        self,
        mesh: DeviceMesh,
        in_specs: Sequence[TensorShardSpec],
        partial: Sequence[TensorShardSpec],
        coordinate: Sequence[int] | None,
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return the shapes of the shards on a device, or of the largest (elements). Raises SpecError."""
        return self._of_shards(lambda shape, spec: spec.local_shape(shape, mesh, coordinate), in_specs, partial)

    def _proven(
        self,
        mesh: DeviceMesh,
        in_specs: tuple[TensorShardSpec, ...],
        partial: tuple[TensorShardSpec, ...],
        extents: Mapping[Digit, int],
        coordinate: Sequence[int] | None = None,
    ) -> bool:
        """Tell whether the operator rebuilt on shards has the whole operator's definition, with the shards' extents.

        The shards are those of the device at ``coordinate`` where parts are unequal.
        """
        assert self.definition is not None
        rows = row_factor(self.op)
        if rows in extents:
            # The sharded rows of a table are masked, not rebuilt: it remains to prove the lookup in the whole table.
            dim = row_dim(self.op)
            assert dim is not None
            in_specs = (in_specs[0].with_dim(dim, ()), *in_specs[1:])
            extents = {digit: extent for digit, extent in extents.items() if digit != rows}
        try:
            in_shapes, out_shapes = self._shard_shapes(mesh, in_specs, partial, coordinate)
        except SpecError:
            return False
        key: Hashable = in_shapes, out_shapes, frozenset(extents.items())
        if self._counted is not None:
            key = pattern(self._shapes, (in_shapes, out_shapes), extents, self._digits, self._counted)
        if key not in self._proofs:
            self._proofs[key] = self._rebuilds(in_shapes, out_shapes, extents)
        return self._proofs[key]

    def _proven_on_all(
        self,
        mesh: DeviceMesh,
        in_specs: tuple[TensorShardSpec, ...],
        partial: tuple[TensorShardSpec, ...],
        extents: Mapping[Digit, int],
        splits: Mapping[Digit, Split],
    ) -> bool:
        """Prove a choice for the shards of every device, and that one operator serves them all.

        Where parts are unequal, in ``splits``, the operator has symbolic extents. With the parts of each device it must
        have the whole operator's definition, with the extents of that device's shards.
        """
        if not splits:
            return self._proven(mesh, in_specs, partial, extents)
        names = sorted({name for split in splits.values() for name in split.symbols(mesh)})
        coordinates: dict[tuple[int, ...], tuple[int, ...]] = {}  # the first device of each combination of parts
        for coordinate in unlike_coordinates(mesh, splits.values()):
            coordinates.setdefault(tuple(part_sizes(names, mesh, coordinate).values()), coordinate)
        if row_axes(self.op, in_specs):
            return self._lookup_proven(mesh, in_specs, partial, extents, splits, names, coordinates.values())
        symbolic: Operator | None = None
        try:
            formal = self._of_shards(lambda shape, spec: formal_shape(shape, spec, mesh), in_specs, partial)
            for coordinate in coordinates.values():
                shapes = self._shard_shapes(mesh, in_specs, partial, coordinate)
                own, sizes = _extents_at(extents, splits, coordinate), part_sizes(names, mesh, coordinate)
                key: Hashable = self._shapes, formal, tuple(sizes.items()), frozenset(own.items())
                if self._counted is not None and not self._has_numbers:
                    key = pattern(self._shapes, shapes, own, self._digits, self._counted, formal)
                if key not in self._proofs:
                    symbolic = self._local(mesh, in_specs, partial) if symbolic is None else symbolic
                    self._proofs[key] = self._has_definition(symbolic, own, sizes)
                if not self._proofs[key]:
                    return False
        except (SpecError, ValueError):
            return False
        return True

    def _lookup_proven(
        self,
        mesh: DeviceMesh,
        in_specs: tuple[TensorShardSpec, ...],
        partial: tuple[TensorShardSpec, ...],
        extents: Mapping[Digit, int],
        splits: Mapping[Digit, Split],
        names: Sequence[str],
        coordinates: Iterable[tuple[int, ...]],
    ) -> bool:
        """Prove that a lookup in sharded rows, with symbols for unequal parts, is the one in each device's shards."""
        try:
            symbolic = definition_of(self._local(mesh, in_specs, partial))
            for coordinate in coordinates:
                own, sizes = _extents_at(extents, splits, coordinate), part_sizes(names, mesh, coordinate)
                if not self._proven(mesh, in_specs, partial, own, coordinate):
                    return False
                fixed = definition_of(self._local(mesh, in_specs, partial, coordinate))
                forms = [rename(analyze(task, sizes).canonical, {}) for task in (symbolic, fixed)]
                if forms[0] != forms[1]:
                    return False
        except (SpecError, TypeError, UnsupportedDefinition, ValueError):  # TypeError: an expression's truth value
            return False
        return True

    def _local(
        self,
        mesh: DeviceMesh,
        in_specs: Sequence[TensorShardSpec],
        partial: Sequence[TensorShardSpec],
        coordinate: Sequence[int] | None = None,
    ) -> Operator:
        """Build the local operator of the device at ``coordinate``, or the one with symbols for shares."""

        def shape(x: hidet.Tensor, spec: TensorShardSpec) -> tuple[Extent, ...]:
            whole = self._shape(x)
            return part_shape(whole, spec, mesh) if coordinate is None else spec.local_shape(whole, mesh, coordinate)

        shards = [
            hidet.symbol(list(shape(x, spec)), x.dtype, x.device)
            for x, spec in zip(self.op.inputs, in_specs, strict=True)
        ]
        shapes = [shape(y, spec) for y, spec in zip(self.op.outputs, partial, strict=True)]
        device = self.op.outputs[0].device
        outputs = localize(self.op, shards, in_specs, shapes, mesh, lambda: hidet.symbol([mesh.ndim], "int32", device))
        return outputs[0].op

    def _rebuilds(
        self,
        in_shapes: Sequence[tuple[int, ...]],
        out_shapes: Sequence[tuple[int, ...]],
        extents: Mapping[Digit, int],
    ) -> bool:
        """Whether the operator, rebuilt on shards of these shapes, has the definition of the whole one."""
        locals_ = [
            hidet.symbol(list(shape), x.dtype, x.device) for x, shape in zip(self.op.inputs, in_shapes, strict=True)
        ]
        try:
            return self._has_definition(rebuild(self.op, locals_, out_shapes)[0].op, extents)
        except (SpecError, ValueError):
            return False

    def _has_definition(
        self, local: Operator, extents: Mapping[Digit, int], sizes: Mapping[str, int] = MappingProxyType({})
    ) -> bool:
        """Whether a local operator, with these ``sizes`` of its symbols, has the definition of the whole one."""
        assert self.definition is not None
        if any(isinstance(local.attrs.get(name), Expr) for name in _NUMBERS):
            return False
        try:
            canonical = analyze(definition_of(local), sizes).canonical
        except (SpecError, TypeError, UnsupportedDefinition, ValueError):  # TypeError: an expression's truth value
            return False
        return bool(rename(canonical, {}) == rename(self.definition.canonical, extents))

    def masks(self, spec: OpShardSpec, mesh: DeviceMesh) -> tuple[tuple[int, int], ...]:
        """List the (input, dim) whose padding must be zero for the operator to run with ``spec``.

        Raises
        ------
        ValueError
            When the spec pads a dim that must not be padded.
        """
        masked = []
        spec = spec.local
        partial = [spec.partial_spec(o) for o in range(len(spec.out_specs))]
        sides = ((self.op.inputs, spec.in_specs, self.in_layouts), (self.op.outputs, partial, self.out_layouts))
        for number, (tensors, specs, layouts) in enumerate(sides):
            for i, (tensor, tensor_spec, layout) in enumerate(zip(tensors, specs, layouts, strict=True)):
                shape = self._shape(tensor)
                for dim, padded in enumerate(tensor_spec.padded_shape(shape, mesh)):
                    if padded == shape[dim]:
                        continue
                    digits = layout[dim] or ()
                    if not self.paddable.issuperset(digits) or not digits:
                        raise ValueError(
                            f"dim {dim} of {shape} as {tensor_spec} would be padded, which is not sound here"
                        )
                    # The rows of a table are masked by the lookup itself.
                    if number == 0 and digits[0] in self.reduce_ops and digits[0] != row_factor(self.op):
                        masked.append((i, dim))
        return tuple(masked)

    def _choice(
        self,
        mesh: DeviceMesh,
        spec: OpShardSpec,
        partial: tuple[TensorShardSpec, ...],
        extents: Mapping[Digit, int],
        splits: Mapping[Digit, Split],
    ) -> Choice:
        choice = self._choice_at(mesh, spec, partial, extents, None)
        if not splits:
            return choice
        devices = (
            self._choice_at(mesh, spec, partial, _extents_at(extents, splits, coordinate), coordinate)
            for coordinate in unlike_coordinates(mesh, splits.values())
        )
        return replace(choice, devices=tuple(devices))

    def _choice_at(
        self,
        mesh: DeviceMesh,
        spec: OpShardSpec,
        partial: tuple[TensorShardSpec, ...],
        extents: Mapping[Digit, int],
        coordinate: tuple[int, ...] | None,
    ) -> Choice:
        bounded = traits_of(self.op).read_elements
        most = {}
        if bounded is not None:
            most = bounded(self.op, spec.local_shapes(self._shapes[0], mesh, coordinate))
        read = sum(
            min(_local_nbytes(x, s, mesh, coordinate), most.get(i, self._most_read(i, extents)) * x.dtype.nbytes)
            for i, (x, s) in enumerate(zip(self.op.inputs, spec.in_specs, strict=True))
        )
        written = sum(_local_nbytes(y, s, mesh, coordinate) for y, s in zip(self.op.outputs, partial, strict=True))
        if self.op.share_map:
            read = written = 0  # the output is the input's memory
        operations = functions = 0
        if self.definition is not None:
            operations, functions = self.definition.operations(extents), self.definition.functions(extents)
        routed = routed_of(self.op)
        if routed is not None:  # its definition sums over all experts, and a row uses its own
            work = routed_work(self.op, routed, spec.local_shapes(self._shapes[0], mesh, coordinate))
            operations, read = work.operations, work.read_bytes
        updates = traits_of(self.op).updates
        if updates is not None:  # its definition says all of the new value, most of which is there already
            values = _local_nbytes(self.op.inputs[1], spec.in_specs[1], mesh, coordinate)
            slots = sum(
                _local_nbytes(x, s, mesh, coordinate)
                for x, s in zip(self.op.inputs[2:], spec.in_specs[2:], strict=True)
            )
            operations = functions = 0
            if updates is Updates.SHIFT:
                read = written + min(values, written)
            else:
                written = values
                read = values + slots
        return Choice(spec, operations, read, written, functions, coordinate)

    def _most_read(self, tensor: int, extents: Mapping[Digit, int]) -> int:
        """Bound the elements read of an input by the number of its accesses: a lookup reads few rows."""
        if self.definition is None:
            return math.prod(self._shape(self.op.inputs[tensor]))
        return sum(
            math.prod(extents.get(d, d.extent) for d in access.nest)
            for access in self.definition.accesses
            if access.tensor == tensor
        )


def derive(op: Operator) -> Rule:
    """Derive the sharding rule of an operator from its definition; if there is none, ``note`` has the reason."""
    reason = REPLICATED.get(type(op))
    if reason is None:
        try:
            return _derive(op)
        except UnsupportedDefinition as error:
            reason = str(error)
    whole = tuple(tuple(None for _ in x.shape) for x in op.inputs)
    return Rule(op, None, whole, tuple(tuple(None for _ in y.shape) for y in op.outputs), (), {}, note=reason)


def _derive(op: Operator) -> Rule:
    definition = analyze(definition_of(op))
    read = {access.tensor for access in definition.accesses}
    if len(read) < len(op.inputs):
        raise UnsupportedDefinition("its definition does not say how it uses all of its inputs")
    blocked = set(definition.pinned)
    whole = traits_of(op).whole_dims
    whole_dims = frozenset() if whole is None else whole(op)
    in_layouts = []
    for number, x in enumerate(op.inputs):
        layout = []
        for dim, size in enumerate(x.shape):
            forms = {access.indices[dim] for access in definition.accesses if access.tensor == number}
            (form, *others) = forms
            digits = None if others or form is None or (number, dim) in whole_dims else form.layout(int(size))
            if digits is None:
                # The dim is indexed in two ways, out of order, or by windows. Each device needs all of it, and the
                # digits that index it must begin at the same origin on every device.
                blocked.update(d for f in forms if f is not None for d in f.digits)
            layout.append(digits)
        in_layouts.append(tuple(layout))
    reduce_ops: dict[Digit, tuple[tuple[int, str], ...]] = {}
    for reduction in definition.reductions:
        for digit in sorted(reduction.digits):
            reduce_ops[digit] = (*reduce_ops.get(digit, ()), (reduction.output, reduction.op))
    rows, table_dim = row_factor(op), row_dim(op)
    if rows is not None and table_dim is not None:
        in_layouts[0] = (*in_layouts[0][:table_dim], (rows,), *in_layouts[0][table_dim + 1 :])
        reduce_ops[rows] = ((0, "sum"),)
    spatial = {d for output in definition.out_digits for dim in output for d in dim}
    factors = (*sorted(spatial - blocked), *sorted(set(reduce_ops) - blocked))
    padded = paddable(op, definition, (*in_layouts, *definition.out_digits), reduce_ops)
    return Rule(op, definition, tuple(in_layouts), tuple(definition.out_digits), factors, reduce_ops, padded)


def _spec(
    layout: Layout, axes: Mapping[Digit, tuple[int, ...]], extents: Mapping[Digit, int], parts: Parts = ()
) -> TensorShardSpec | None:
    """Derive a tensor's spec from an assignment of mesh axes to digits; None if shards would not be contiguous."""
    per_dim = []
    used: list[int] = []
    for digits in layout:
        split: list[int] = []
        whole_above = True
        for digit in digits or ():
            if digit in axes:
                if not whole_above:
                    return None
                split.extend(axes[digit])
                used.extend(axes[digit])
            whole_above = whole_above and extents.get(digit, digit.extent) == 1
        per_dim.append(tuple(split))
    # No tensor sharding spec shards a digit that indexes two dims (a diagonal).
    return TensorShardSpec(tuple(per_dim), parts) if len(set(used)) == len(used) else None


def _indexed_by(digit: Digit, layouts: Sequence[Sequence[tuple[Digit, ...] | None]]) -> list[tuple[int, int]]:
    """List the (tensor, dim)s that a digit indexes, in order."""
    return [
        (number, dim)
        for number, layout in enumerate(layouts)
        for dim, digits in enumerate(layout)
        if digit in (digits or ())
    ]


def _split_by_axis(specs: Sequence[TensorShardSpec]) -> dict[int, list[tuple[int, int]]]:
    """List the (tensor, dim)s that each mesh axis splits, in order."""
    splits: dict[int, list[tuple[int, int]]] = {}
    for number, spec in enumerate(specs):
        for dim, split in enumerate(spec.mesh_axes_per_dim):
            for axis in split:
                splits.setdefault(axis, []).append((number, dim))
    return splits


def _partial_specs(spec: OpShardSpec) -> list[TensorShardSpec] | None:
    """Derive the specs of an operator's outputs before reduction; None if a reduce function names a missing dim."""
    for out_spec, fns in zip(spec.out_specs, spec.reduce_fns, strict=True):
        if any(fn.dim is not None and fn.dim >= len(out_spec.mesh_axes_per_dim) for fn in fns):
            return None
    return [spec.partial_spec(o) for o in range(len(spec.out_specs))]


def _reduced(
    partial: TensorShardSpec,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    reductions: list[tuple[int, str]],
    offered: OfferedParts = NO_PARTS,
) -> list[tuple[TensorShardSpec, tuple[ReduceFn, ...]]]:
    """List all ways to reduce a partial output: as a whole, or by scattering a mesh axis onto a dim it divides."""
    results = []
    ways = [
        [
            None,
            *(
                (kind, dim, parts)
                for kind in SCATTERING
                for dim, size in enumerate(shape)
                for parts in offered.of(axis, size, True)
            ),
        ]
        for axis, _ in reductions
    ]
    for chosen in itertools.product(*ways):
        spec = partial
        fns: list[ReduceFn] = []
        rest: dict[str, list[int]] = {}
        for (axis, op), way in zip(reductions, chosen, strict=True):
            if way is None:
                rest.setdefault(op, []).append(axis)
            else:
                kind, dim, parts = way
                fns.append(ReduceFn(kind, op, (axis,), dim, parts))
                spec = fns[-1].after(spec)
        # Scatters first: what is reduced as a whole then has less data.
        for kinds in itertools.product(REDUCING_WHOLE, repeat=len(rest)):
            whole = [
                ReduceFn(kind, op, tuple(sorted(fn_axes)))
                for kind, (op, fn_axes) in zip(kinds, rest.items(), strict=True)
            ]
            if len(rest) <= 1 and _scatters_exactly(spec, shape, mesh, [*fns, *whole]):
                results.append((spec, (*fns, *whole)))
    return results


def _reduced_by(
    partial: TensorShardSpec,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    reductions: list[tuple[int, str]],
    fns: tuple[ReduceFn, ...],
) -> TensorShardSpec | None:
    """Derive the spec of an output after these reduce functions; None if they do not reduce it completely.

    Reductions by one op may come in any order, over one mesh axis or several at a time; each axis must be reduced over
    once. Reductions by different ops do not commute, and must be in the order of :func:`_reduced`.
    """
    ops = {op for _, op in reductions}
    if len(ops) > 1:
        return next((spec for spec, reduced in _reduced(partial, shape, mesh, reductions) if reduced == fns), None)
    reduced_axes = sorted(axis for fn in fns for axis in fn.mesh_axes)
    if reduced_axes != sorted(axis for axis, _ in reductions) or any(fn.op not in ops for fn in fns):
        return None
    spec = partial
    for fn in fns:
        spec = fn.after(spec)
    return spec if _scatters_exactly(spec, shape, mesh, fns) else None


def _scatters_exactly(
    reduced: TensorShardSpec, shape: tuple[int, ...], mesh: DeviceMesh, fns: Iterable[ReduceFn]
) -> bool:
    """Tell whether reduce functions split only dims that divide, so that no padding is scattered."""
    scattered = (fn.dim for fn in fns if fn.dim is not None)
    return all(shape[dim] % reduced.units(dim, mesh) == 0 for dim in scattered)


def _extents_at(
    extents: Mapping[Digit, int], splits: Mapping[Digit, Split], coordinate: Sequence[int]
) -> dict[Digit, int]:
    """Return the extent of each sharded digit on the device at ``coordinate``, given those of the largest shards."""
    return {
        digit: splits[digit].interval(digit.extent, coordinate)[1] if digit in splits else extent
        for digit, extent in extents.items()
    }


def unlike_coordinates(mesh: DeviceMesh, splits: Iterable[Split]) -> Iterator[tuple[int, ...]]:
    """Yield coordinates of devices whose parts differ, the first of each kind; 0 along axes with equal parts.

    Along a first axis with shares, devices may differ, too: all of its coordinates are yielded if it has unequal parts.
    """
    own: list[Sequence[int]] = [(0,)] * mesh.ndim
    for split in splits:
        for axis, parts in zip(split.mesh_axes, split.parts, strict=True):
            if len(set(parts)) > 1:
                first = {part: number for number, part in reversed(list(enumerate(parts)))}
                own[axis] = range(len(parts)) if axis == 0 and mesh.shares else sorted(first.values())
    yield from itertools.product(*own)


def _local_nbytes(
    tensor: hidet.Tensor, spec: TensorShardSpec, mesh: DeviceMesh, coordinate: Sequence[int] | None
) -> int:
    return shard_nbytes(tensor, [int(size) for size in tensor.shape], spec, mesh, coordinate)


def _letters() -> Iterable[str]:
    for n in itertools.count():
        for letter in "ijklmnopqrstuvwxyzabcdefgh":
            yield letter + (str(n) if n else "")


class RuleTable:
    """A cache of the rules and choices of a graph's operators, one for all operators that differ only in their data.

    Parameters
    ----------
    mesh: DeviceMesh
        The mesh of the choices.
    like: RuleTable, optional
        A table for any mesh and graph, with which this one shares rules and proofs: their keys have all that they
        depend on.
    offered: OfferedParts, optional
        The parts in which axes may split, besides the mesh's shares.
    """

    def __init__(self, mesh: DeviceMesh, like: RuleTable | None = None, offered: OfferedParts = NO_PARTS):
        self.mesh = mesh
        self.offered = offered
        self._rules: dict[Any, Rule] = {} if like is None else like._rules
        self._proofs: dict[Hashable, bool] = {} if like is None else like._proofs  # that choices hold for all sizes
        self._choices: dict[Any, tuple[Choice, ...]] = {}
        self._joint: dict[Any, tuple[Choice, ...]] = {}
        self._replicated: dict[Any, tuple[Choice]] = {}
        self._choice_of: dict[tuple[Any, OpShardSpec], Choice | None] = {}
        self._signatures: WeakKeyDictionary[Operator, Any] = WeakKeyDictionary() if like is None else like._signatures

    def __call__(self, op: Operator) -> tuple[Rule, tuple[Choice, ...]]:
        """Return the rule of an operator, or of an equal one, and its choices on the mesh."""
        key, rule = self._rule(op)
        if key not in self._choices:
            self._choices[key] = rule.choices(self.mesh, self.offered)
        return rule, self._choices[key]

    def joint(self, op: Operator, proven: bool = True) -> tuple[Choice, ...]:
        """Return the :meth:`Rule.joint_choices` of an operator, without deriving all choices."""
        key, rule = self._rule(op)
        if (key, proven) not in self._joint:
            self._joint[key, proven] = rule.joint_choices(self.mesh, proven)
        return self._joint[key, proven]

    def replicated(self, op: Operator) -> tuple[Choice]:
        """Return the choice of an operator that computes everything on each device."""
        key, rule = self._rule(op)
        if key not in self._replicated:
            self._replicated[key] = (rule.replicated_choice(self.mesh),)
        return self._replicated[key]

    def rule(self, op: Operator) -> Rule:
        """Return the rule of an operator, or of an equal one."""
        return self._rule(op)[1]

    def note(self, op: Operator) -> str:
        """Return the reason why an operator is only replicated, or not split by an uneven axis; else an empty text."""
        rule = self.rule(op)
        if rule.definition is None:
            return f"replicated: {rule.note}"
        reasons = []
        for axis in range(self.mesh.ndim if self.mesh.is_uneven() else 0):
            specs = (spec for choice in self(op)[1] for spec in (*choice.spec.in_specs, *choice.spec.out_specs))
            if not self.mesh.shares[axis] or any(axis in spec.mesh_axes for spec in specs):
                continue
            parts = sum(self.mesh.shares_of(axis))
            fitting = any(factor.extent % parts == 0 for factor in rule.factors)
            why = "one program does not serve all its shares" if fitting else f"no factor of it has {parts} equal parts"
            reasons.append(f"not split by {self.mesh.axis_names[axis]}: {why}")
        return "; ".join(reasons)

    def choice(self, op: Operator, spec: OpShardSpec) -> Choice | None:
        """Return the choice of an operator with this spec, without deriving all choices; None if there is none."""
        key, rule = self._rule(op)
        if (key, spec) not in self._choice_of:
            self._choice_of[key, spec] = rule.choice(spec, self.mesh)
        return self._choice_of[key, spec]

    def _rule(self, op: Operator) -> tuple[Any, Rule]:
        key = self._signatures.get(op)
        if key is None:
            key = self._signatures[op] = signature_of(op)
        if key not in self._rules:
            self._rules[key] = derive(op)
        return key, self._rules[key]


def signature_of(op: Operator) -> Any:
    """Make a key that is equal for operators with the same definition; an incomparable attribute makes it unique."""
    values = plain_attributes(op)
    if values is None:
        return id(op)
    tensors = tuple(
        [
            (x.dtype.name, tuple([size if type(size) is int else extent_text(size) for size in x.shape]), storage_of(x))
            for x in op.inputs
        ]
    )
    return type(op), tensors, values
