"""Patterns of specs, in which some dims or tensors are free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hidet_dist.checks import shown
from hidet_dist.errors import SpecError
from hidet_dist.spec.operator import OpShardSpec
from hidet_dist.spec.parts import Parts, axes_text
from hidet_dist.spec.tensor import TensorShardSpec, dims_of

FREE = "?"
_TENSOR = re.compile(r"\([^()]*\)|\?")


@dataclass(frozen=True)
class SpecPattern:
    """A tensor sharding spec with free dims.

    ``mesh_axes_per_dim[d]`` are the mesh axes that split dim d, or None for a free dim. The field itself is None in the
    pattern that every spec matches. The written form is ``(S0, ?, R)``, or ``?``. Axes with ``parts`` split in these
    parts, written ``(S0[5,4], ?, R)``; others in any parts.

    Raises
    ------
    SpecError
        For a mesh axis used twice or a negative one.
    """

    mesh_axes_per_dim: tuple[tuple[int, ...] | None, ...] | None = None
    parts: Parts = ()

    def __post_init__(self) -> None:
        if self.mesh_axes_per_dim is not None:
            per_dim = tuple(None if axes is None else tuple(axes) for axes in self.mesh_axes_per_dim)
            object.__setattr__(self, "mesh_axes_per_dim", per_dim)
            # Raises SpecError unless some spec matches.
            object.__setattr__(self, "parts", TensorShardSpec(tuple(axes or () for axes in per_dim), self.parts).parts)

    @classmethod
    def of(cls, spec: TensorShardSpec) -> SpecPattern:
        """Make the pattern that ``spec`` matches, and others only in parts that it does not give."""
        return cls(spec.mesh_axes_per_dim, spec.parts)

    @property
    def spec(self) -> TensorShardSpec | None:
        """The only spec that matches, but for parts that are not given; None if a dim is free."""
        per_dim = self.mesh_axes_per_dim
        if per_dim is None or any(axes is None for axes in per_dim):
            return None
        return TensorShardSpec(tuple(axes or () for axes in per_dim), self.parts)

    @property
    def mesh_axes(self) -> tuple[int, ...]:
        """The mesh axes in the pattern, in dim order."""
        return tuple(axis for axes in self.mesh_axes_per_dim or () for axis in axes or ())

    def matches(self, spec: TensorShardSpec) -> bool:
        """Tell whether ``spec`` matches the pattern."""
        per_dim = self.mesh_axes_per_dim
        if per_dim is None:
            return True
        return (
            len(per_dim) == spec.ndim
            and set(self.parts) <= set(spec.parts)
            and all(axes is None or axes == given for axes, given in zip(per_dim, spec.mesh_axes_per_dim, strict=True))
        )

    def __str__(self) -> str:
        if self.mesh_axes_per_dim is None:
            return FREE
        dims = (FREE if a is None else "S" + axes_text(a, self.parts) if a else "R" for a in self.mesh_axes_per_dim)
        return f"({', '.join(dims)})"

    @classmethod
    def parse(cls, text: str) -> SpecPattern:
        """Parse the text that ``str()`` returns for a pattern. Raises SpecError for any other text."""
        stripped = text.strip()
        if stripped == FREE:
            return cls()
        if not (stripped.startswith("(") and stripped.endswith(")")):
            raise SpecError(f"Not a pattern of a spec: {shown(text)}. Write it as (S0, ?, R), or ? for any spec.")
        tokens = [token.strip() for token in dims_of(stripped[1:-1])] if stripped[1:-1].strip() else []
        # With R in place of free dims, the text must be a spec; parsing refuses any other text.
        spec = TensorShardSpec.parse(f"({', '.join('R' if token == FREE else token for token in tokens)})")
        pairs = zip(tokens, spec.mesh_axes_per_dim, strict=True)
        return cls(tuple(None if token == FREE else axes for token, axes in pairs), spec.parts)


@dataclass(frozen=True)
class OpSpecPattern:
    """An operator sharding spec with free tensors or dims. Reduce functions are always free.

    The written form is ``(S0, R), ? -> (S0, ?)``.
    """

    in_patterns: tuple[SpecPattern, ...]
    out_patterns: tuple[SpecPattern, ...]

    @classmethod
    def of(cls, spec: OpShardSpec) -> OpSpecPattern:
        """Make the pattern that matches the tensor specs of ``spec``."""
        return cls(tuple(map(SpecPattern.of, spec.in_specs)), tuple(map(SpecPattern.of, spec.out_specs)))

    @property
    def patterns(self) -> tuple[SpecPattern, ...]:
        """The patterns of the inputs, then those of the outputs."""
        return (*self.in_patterns, *self.out_patterns)

    def matches(self, spec: OpShardSpec) -> bool:
        """Tell whether ``spec`` matches the pattern."""
        return _match(self.in_patterns, spec.in_specs) and _match(self.out_patterns, spec.out_specs)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.in_patterns))} -> {', '.join(map(str, self.out_patterns))}".strip()

    @classmethod
    def parse(cls, text: str) -> OpSpecPattern:
        """Parse the text that ``str()`` returns for a pattern. Raises SpecError for any other text."""
        ins, arrow, outs = text.partition("->")
        if not arrow or _TENSOR.sub("", ins + outs).replace(",", "").strip():
            raise SpecError(f"Not a pattern of an operator's spec: {shown(text)}. Write it as (S0, R), ? -> (S0, ?).")
        sides = (tuple(map(SpecPattern.parse, _TENSOR.findall(side))) for side in (ins, outs))
        return cls(*sides)


def _match(patterns: Sequence[SpecPattern], specs: Sequence[TensorShardSpec]) -> bool:
    return len(patterns) == len(specs) and all(p.matches(spec) for p, spec in zip(patterns, specs, strict=True))
