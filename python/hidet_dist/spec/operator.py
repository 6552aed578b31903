"""The operator sharding spec: the specs of an operator's inputs and outputs, and its reduce functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hidet_dist.checks import shown
from hidet_dist.errors import SpecError
from hidet_dist.spec.collectives import COLLECTIVES, REDUCING
from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.parts import AXES, Parts, axes_text, normal_parts, parse_axes
from hidet_dist.spec.tensor import TensorShardSpec

REDUCE_OPS = ("sum", "max", "min", "product", "average")
_REDUCE = re.compile(rf"^({'|'.join(REDUCING)})\((\w+),\s*axes=({AXES})(?:,\s*dim=(\d{{1,9}}))?\)$")
_DISPATCH = re.compile(rf"^dispatch\(((?:\d{{1,9}} ?)+),\s*axes=({AXES})\)$")
_CALL = re.compile(r"\w+\([^()]*\)")
_TENSOR = re.compile(r"\([^()]*\)")


@dataclass(frozen=True)
class ReduceFn:
    """The collective that completes a partial output: ``kind`` over ``mesh_axes`` by ``op``; ``dim`` if it scatters.

    ``parts`` are the parts into which it scatters, by axis, where they are not the mesh's shares.

    Raises
    ------
    SpecError
        For an unknown kind or op, no mesh axis, a missing dim, or a dim that the kind does not take.
    """

    kind: str
    op: str
    mesh_axes: tuple[int, ...]
    dim: int | None = None
    parts: Parts = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh_axes", tuple(self.mesh_axes))
        if self.parts:
            object.__setattr__(self, "parts", normal_parts(self.parts, () if self.dim is None else self.mesh_axes))
        if self.kind not in REDUCING:
            raise SpecError(f"A reduce function is one of {', '.join(REDUCING)}; got {shown(self.kind)}.")
        if self.op not in REDUCE_OPS:
            raise SpecError(f"A reduce function reduces by one of {', '.join(REDUCE_OPS)}; got {shown(self.op)}.")
        if not self.mesh_axes or len(set(self.mesh_axes)) != len(self.mesh_axes):
            raise SpecError(f"A reduce function needs distinct mesh axes; got {self.mesh_axes}.")
        if (self.dim is not None) != COLLECTIVES[self.kind].splits:
            splits = "splits a dim, which it names" if self.dim is None else "splits no dim"
            raise SpecError(f"The reduce function {self.kind} {splits}; got the dim {self.dim}.")

    def after(self, partial: TensorShardSpec) -> TensorShardSpec:
        """Return the spec of a partial tensor after it is reduced."""
        if self.dim is None:
            return partial
        return partial.with_dim(self.dim, (*partial.mesh_axes_per_dim[self.dim], *self.mesh_axes), self.parts)

    def __str__(self) -> str:
        dim = "" if self.dim is None else f", dim={self.dim}"
        return f"{self.kind}({self.op}, axes={axes_text(self.mesh_axes, self.parts)}{dim})"

    @classmethod
    def parse(cls, text: str) -> ReduceFn:
        """Parse the text that ``str()`` returns for a reduce function. Raises SpecError for any other text."""
        match = _REDUCE.match(text.strip())
        if match is None:
            raise SpecError(f"Not a reduce function: {shown(text)}. Write it as all_reduce(sum, axes=0).")
        kind, op, axes, dim = match.groups()
        mesh_axes, parts = parse_axes(axes)
        return cls(kind, op, mesh_axes, None if dim is None else int(dim), parts)


@dataclass(frozen=True)
class Dispatch:
    """The exchange of tokens before and after an operator whose rows use the experts that were chosen for them.

    Each rank of ``mesh_axes`` has some of the tokens, and some of the experts. It sends a token to the ranks that have
    one of its experts, and gets their results back, which it adds up: this is how the first reduce function of output 0
    is computed.

    Attributes
    ----------
    inputs: the positions of the inputs with an entry for each token in dim 0.
    mesh_axes: the axes that split the experts, and the tokens within the parts of other axes, in ascending order.

    Raises
    ------
    SpecError
        For no inputs, no axes, or an order that is not ascending.
    """

    inputs: tuple[int, ...]
    mesh_axes: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, numbers in (("inputs", self.inputs), ("mesh axes", self.mesh_axes)):
            if not numbers or list(numbers) != sorted(set(numbers)):
                raise SpecError(f"A dispatch needs {what} in ascending order; got {shown(numbers)}.")

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps by which the inputs would be gathered if all tokens went to all ranks, as text."""
        return (f"all_gather(axes={axes_text(self.mesh_axes, ())}, dim=0)",) * len(self.inputs)

    def gathered(self, spec: TensorShardSpec) -> TensorShardSpec:
        """Return the spec of an input whose tokens are gathered. Raises SpecError if the axes do not split them."""
        axes, count = spec.mesh_axes_per_dim[0] if spec.ndim else (), len(self.mesh_axes)
        if axes[-count:] != self.mesh_axes:
            raise SpecError(f"Tokens over axes {axes_text(self.mesh_axes, ())} cannot be dispatched from {spec}.")
        return spec.with_dim(0, axes[:-count])

    def __str__(self) -> str:
        return f"dispatch({' '.join(map(str, self.inputs))}, axes={axes_text(self.mesh_axes, ())})"

    @classmethod
    def parse(cls, text: str) -> Dispatch:
        """Parse the text that ``str()`` returns for a dispatch. Raises SpecError for any other text."""
        match = _DISPATCH.match(text.strip())
        if match is None:
            raise SpecError(f"Not a dispatch: {shown(text)}. Write it as dispatch(0 2 4, axes=0).")
        mesh_axes, _ = parse_axes(match[2])
        return cls(tuple(map(int, match[1].split())), mesh_axes)


@dataclass(frozen=True)
class OpShardSpec:
    """The specs with which an operator, run on shards of its inputs, computes shards of its outputs.

    ``reduce_fns[i]`` are applied to output i, in order, if the local result is partial; ``out_specs[i]`` is the spec
    after them. Written ``(S0, R), (R, R) -> (S0, R)``, with reduce functions after ``|``, one list per output, and a
    ``dispatch`` after another ``|``.

    Raises
    ------
    SpecError
        When the number of reduce function lists is not the number of outputs, or the dispatch does not fit.
    """

    in_specs: tuple[TensorShardSpec, ...]
    out_specs: tuple[TensorShardSpec, ...]
    reduce_fns: tuple[tuple[ReduceFn, ...], ...] = ()
    dispatch: Dispatch | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_specs", tuple(self.in_specs))
        object.__setattr__(self, "out_specs", tuple(self.out_specs))
        fns = tuple(tuple(fns) for fns in self.reduce_fns) or ((),) * len(self.out_specs)
        object.__setattr__(self, "reduce_fns", fns)
        if len(fns) != len(self.out_specs):
            raise SpecError(f"{len(self.out_specs)} outputs but reduce functions for {len(fns)}.")
        if self.dispatch is not None:
            combine = fns[0][0] if fns and fns[0] else None
            axes, dim = (None, None) if combine is None else (combine.mesh_axes, combine.dim)
            if axes != self.dispatch.mesh_axes or dim != 0 or self.dispatch.inputs[-1] >= len(self.in_specs):
                raise SpecError(
                    f"The {self.dispatch} needs its inputs, and a reduce-scatter over its axes along dim 0."
                )
            for number in self.dispatch.inputs:
                self.dispatch.gathered(self.in_specs[number])

    @property
    def local(self) -> OpShardSpec:
        """The specs of the local operator: after a dispatch, its inputs have the tokens of all ranks of a group."""
        if self.dispatch is None:
            return self
        ins = list(self.in_specs)
        for number in self.dispatch.inputs:
            ins[number] = self.dispatch.gathered(ins[number])
        return OpShardSpec(tuple(ins), self.out_specs, self.reduce_fns)

    def local_shapes(
        self, shapes: Iterable[Sequence[int]], mesh: DeviceMesh, coordinate: Sequence[int] | None = None
    ) -> list[tuple[int, ...]]:
        """Return the shapes (elements) of the local operator's inputs, from those of the whole ones.

        They are those of the device at ``coordinate``; by default, the largest ones. Raises SpecError where specs do
        not fit.
        """
        specs = self.local.in_specs
        return [spec.local_shape(shape, mesh, coordinate) for spec, shape in zip(specs, shapes, strict=True)]

    def dispatched(self, dispatch: Dispatch) -> OpShardSpec:
        """Return the spec that gets its tokens by a dispatch. Raises SpecError if its inputs cannot be split so."""
        ins = list(self.in_specs)
        for number in dispatch.inputs:
            ins[number] = ins[number].with_dim(0, (*ins[number].mesh_axes_per_dim[0], *dispatch.mesh_axes))
        return OpShardSpec(tuple(ins), self.out_specs, self.reduce_fns, dispatch)

    @property
    def is_replicated(self) -> bool:
        """True if every device computes the whole operator."""
        return all(s.is_replicated for s in self.in_specs + self.out_specs) and not any(self.reduce_fns)

    def partial_spec(self, output: int) -> TensorShardSpec:
        """Return the spec of an output's partial result, before its reduce functions."""
        spec = self.out_specs[output]
        for fn in reversed(self.reduce_fns[output]):
            if fn.dim is not None:
                spec = spec.with_dim(fn.dim, spec.mesh_axes_per_dim[fn.dim][: -len(fn.mesh_axes)])
        return spec

    def reductions(self, output: int) -> tuple[TensorShardSpec, tuple[ReduceFn, ...]]:
        """Return an output's spec and reduce functions after the one that a dispatch computes, if there is one."""
        partial, fns = self.partial_spec(output), self.reduce_fns[output]
        if self.dispatch is None or output:
            return partial, fns
        return fns[0].after(partial), fns[1:]

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.in_specs))} -> {', '.join(map(str, self.out_specs))}".strip()
        if any(self.reduce_fns):
            text += " | " + " ; ".join(" ".join(map(str, fns)) for fns in self.reduce_fns)
        return text if self.dispatch is None else f"{text} | {self.dispatch}"

    @classmethod
    def parse(cls, text: str) -> OpShardSpec:
        """Parse the text that ``str()`` returns for a spec. Raises SpecError for any other text."""
        head, bar, tail = text.partition("|")
        ins, arrow, outs = head.partition("->")
        if not arrow or _TENSOR.sub("", ins + outs).replace(",", "").strip():
            raise SpecError(f"Not an operator sharding spec: {shown(text)}. Write it as (S0, R), (R, R) -> (S0, R).")
        out_specs = tuple(TensorShardSpec.parse(part) for part in _TENSOR.findall(outs))
        tail, second_bar, exchange = tail.partition("|")
        dispatch = Dispatch.parse(exchange) if second_bar else None
        fns: tuple[tuple[ReduceFn, ...], ...] = ()
        if bar:
            parts = tail.split(";")
            if any(_CALL.sub("", part).strip() for part in parts):
                raise SpecError(
                    f"Not an operator sharding spec: {shown(text)}. After | there may only be reduce functions."
                )
            fns = tuple(tuple(map(ReduceFn.parse, _CALL.findall(part))) for part in parts)
        return cls(tuple(TensorShardSpec.parse(part) for part in _TENSOR.findall(ins)), out_specs, fns, dispatch)
