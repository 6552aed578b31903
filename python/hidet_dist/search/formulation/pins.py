"""Pins: specs that a user prescribes for weights, inputs, outputs, activations and operators."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hidet

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.search.formulation.labels import tensor_labels
from hidet_dist.spec import DeviceMesh, OpShardSpec, OpSpecPattern, SpecPattern, TensorShardSpec
from hidet_dist.spec.parts import check_parts
from hidet_dist.view import GraphView

OPERATOR = "op:"
_OUTPUT = re.compile(r"^y(\d+)$")
_SHOWN = 12  # possible specs that an error message lists

T = TypeVar("T")


@dataclass(frozen=True)
class Pin:
    """A spec or pattern that a tensor or an operator must have; ``name`` is the user's name of it.

    Names: ``x0`` is a graph input as it arrives, ``y0`` a graph output as it is delivered, ``w0`` a weight as it is
    stored, ``s0`` a state, ``t5.0`` the first output of operator 5 as it is computed, ``op:5`` operator 5,
    ``op:Softmax`` the only operator of that name, ``op:Matmul#2`` the third of that name. The user's names stand for
    the tensors they name.
    """

    name: str
    pattern: SpecPattern | OpSpecPattern

    def __str__(self) -> str:
        return f"{self.name} = {self.pattern}"

    @property
    def patterns(self) -> tuple[SpecPattern, ...]:
        """The patterns of tensors' specs in the pin."""
        return self.pattern.patterns if isinstance(self.pattern, OpSpecPattern) else (self.pattern,)

    def matches(self, spec: TensorShardSpec | OpShardSpec) -> bool:
        """Whether ``spec`` satisfies the pin."""
        if isinstance(self.pattern, SpecPattern):
            return isinstance(spec, TensorShardSpec) and self.pattern.matches(spec)
        return isinstance(spec, OpShardSpec) and self.pattern.matches(spec)


def parse_pins(given: Mapping[str, Any] | None, what: str = "pins") -> tuple[Pin, ...]:
    """Parse pins from a mapping of names to specs or patterns, or the text of either.

    Raises
    ------
    ConfigError
        When a value is none of these, or a pattern does not fit the kind of its name.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} must map names to specs, such as {{'w0': '(S0, ?)'}}; got {shown(given)}.")
    pins = []
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{what} has the name {shown(name)}; names are text, such as 'w0' or 'op:7'.")
        operator = name.startswith(OPERATOR)
        try:
            pins.append(Pin(name, _pattern(value, operator)))
        except SpecError as error:
            raise ConfigError(f"{what}[{name!r}]: {error}") from error
        except TypeError as error:
            kind = "an operator's spec, as '(S0, R), ? -> (S0, ?)'" if operator else "a tensor's spec, as '(S0, ?)'"
            raise ConfigError(f"{what}[{name!r}] must be {kind}; got {shown(value)}.") from error
    return tuple(pins)


def _pattern(value: Any, operator: bool) -> SpecPattern | OpSpecPattern:
    pattern: Any = OpSpecPattern if operator else SpecPattern
    made: SpecPattern | OpSpecPattern
    if isinstance(value, str):
        made = pattern.parse(value)
    elif isinstance(value, OpShardSpec if operator else TensorShardSpec):
        made = pattern.of(value)
    elif isinstance(value, pattern):
        made = value
    else:
        raise TypeError
    return made


class Pins:
    """The pins of a graph by the tensor or operator that they constrain, in the order in which the user wrote them.

    Raises
    ------
    ConfigError
        When the graph has nothing of a pin's name, or the pin does not fit its rank or the mesh.
    """

    def __init__(
        self, view: GraphView, mesh: DeviceMesh, pins: Sequence[Pin], names: Mapping[str, hidet.Tensor] | None = None
    ):
        self.view = view
        self.mesh = mesh
        self.names = {label: name for name, label in tensor_labels(view, {}).items()}
        self.names.update((label, view.names[t]) for label, t in (names or {}).items() if t in view.names)
        self.all = tuple(pins)
        self.tensors: dict[str, list[Pin]] = {}
        self.outputs: dict[int, list[Pin]] = {}
        self.operators: dict[int, list[tuple[Pin, int | None]]] = {}  # a pin, and the number of the output it is for
        for pin in pins:
            self._add(pin)

    def _add(self, pin: Pin) -> None:
        view = self.view
        if isinstance(pin.pattern, OpSpecPattern):
            number = self.operator_number(pin.name)
            op = view.operators[number]
            counts = (len(pin.pattern.in_patterns), len(pin.pattern.out_patterns))
            if counts != (len(op.inputs), len(op.outputs)):
                raise ConfigError(
                    f"The pin {pin} has {counts[0]} inputs and {counts[1]} outputs; operator {number}, {op.name}, has "
                    f"{len(op.inputs)} and {len(op.outputs)}."
                )
            for pattern, tensor in zip(pin.pattern.patterns, (*op.inputs, *op.outputs), strict=True):
                self._check(pin, pattern, view.shape_of(tensor))
            self.operators.setdefault(number, []).append((pin, None))
            return
        output = _OUTPUT.match(pin.name) if pin.name not in self.names else None
        if output is not None and int(output.group(1)) < len(view.outputs):
            number = int(output.group(1))
            self._check(pin, pin.pattern, view.shape(view.outputs[number]))
            self.outputs.setdefault(number, []).append(pin)
            return
        name = self.names.get(pin.name, pin.name)
        if name not in view.tensors:
            known = [
                *self.names,
                *view.inputs,
                *view.weights,
                *view.states,
                *(f"y{i}" for i in range(len(view.outputs))),
            ]
            near = difflib.get_close_matches(pin.name, [*known, *view.tensors])
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known[:_SHOWN])}, ..."
            raise ConfigError(f"The graph has nothing called {pin.name!r} whose spec could be pinned; {hint}")
        self._check(pin, pin.pattern, view.shape(name))
        if name in view.inputs or name in view.weights or name in view.states:
            self.tensors.setdefault(name, []).append(pin)
        else:
            op, _, output_number = name[1:].partition(".")
            self.operators.setdefault(int(op), []).append((pin, int(output_number)))

    def operator_number(self, name: str) -> int:
        """Find the operator that a pin's name is about. Raises ConfigError."""
        view, selector = self.view, name.removeprefix(OPERATOR)
        if selector.isdecimal():
            if int(selector) < len(view.operators):
                return int(selector)
            raise ConfigError(f"There is no operator {selector} to pin: the graph has {len(view.operators)}.")
        kind, _, place = selector.partition("#")
        numbers = [number for number, op in enumerate(view.operators) if op.name == kind]
        if place.isdecimal() and int(place) < len(numbers):
            return numbers[int(place)]
        if len(numbers) == 1 and not place:
            return numbers[0]
        if numbers:
            raise ConfigError(
                f"The graph has {len(numbers)} operators called {kind} ({', '.join(map(str, numbers[:_SHOWN]))}"
                f"{', ...' if len(numbers) > _SHOWN else ''}); pin one as op:{numbers[0]} or op:{kind}#0, not {name!r}."
            )
        kinds = sorted({op.name for op in view.operators})
        raise ConfigError(f"There is no operator {selector!r} to pin: the graph has {', '.join(kinds)}.")

    def _check(self, pin: Pin, pattern: SpecPattern, shape: tuple[int, ...]) -> None:
        per_dim = pattern.mesh_axes_per_dim
        if per_dim is not None and len(per_dim) != len(shape):
            raise ConfigError(f"The pin {pin} does not fit: {pattern} has {len(per_dim)} dims, the shape is {shape}.")
        for axis in pattern.mesh_axes:
            if axis >= self.mesh.ndim:
                raise ConfigError(
                    f"The pin {pin} does not fit: it names the mesh axis {axis}, and the mesh is {self.mesh}."
                )
        try:
            check_parts(pattern.parts, self.mesh, f"The pin {pin}")
        except SpecError as error:
            raise ConfigError(str(error)) from error

    def layouts(
        self,
        pins: Sequence[Pin],
        what: str,
        shape: tuple[int, ...],
        options: Sequence[TensorShardSpec],
        padded: bool = False,
    ) -> list[TensorShardSpec]:
        """Select the specs of ``options`` that satisfy all pins. A pin that is a full spec need not be among them.

        Only with ``padded`` may such a spec split a dim that does not divide.

        Raises
        ------
        ConfigError
            When a pin allows none of them or does not fit the tensor, or pins contradict each other.
        """
        known = dict.fromkeys(options)
        for pin in pins:
            spec = pin.pattern.spec if isinstance(pin.pattern, SpecPattern) else None
            if spec is not None and (spec.parts or not any(map(pin.matches, options))):
                try:
                    spec.validate(shape, self.mesh, padded)
                except SpecError as error:
                    hint = (
                        " A symbolic dim counts as the number that it is declared to be a multiple of."
                        if self.view.symbols
                        else ""
                    )
                    raise ConfigError(f"The pin {pin} does not fit {what}: {error}{hint}") from error
                known.setdefault(spec)
        return narrow([(pin, pin.matches) for pin in pins], list(known), str, what)

    def choices(self, number: int, specs: Sequence[OpShardSpec]) -> list[int]:
        """Select the positions of specs that satisfy the pins of an operator and its outputs. Raises ConfigError."""
        operator_pins = self.operators.get(number, [])
        if not operator_pins:
            return list(range(len(specs)))

        def matcher(pin: Pin, output: int | None) -> Callable[[int], bool]:
            if output is None:
                return lambda k: pin.matches(specs[k])
            return lambda k: pin.matches(specs[k].out_specs[output])

        def shown(k: int) -> str:
            outputs = {output for _, output in operator_pins}
            (output,) = outputs if len(outputs) == 1 else (None,)
            return str(specs[k] if output is None else specs[k].out_specs[output])

        what = f"operator {number}, {self.view.operators[number].name},"
        return narrow(
            [(pin, matcher(pin, output)) for pin, output in operator_pins], list(range(len(specs))), shown, what
        )


def narrow(
    pins: Sequence[tuple[Pin, Callable[[T], bool]]], options: Sequence[T], shown: Callable[[T], str], what: str
) -> list[T]:
    """Select the options that satisfy every pin. Raises ConfigError, which names one or two contradictory pins."""
    left = [{i for i, option in enumerate(options) if satisfied(option)} for _, satisfied in pins]
    for (pin, _), choices in zip(pins, left, strict=True):
        if not choices:
            possible = list(dict.fromkeys(map(shown, options)))
            more = f" and {len(possible) - _SHOWN} more" if len(possible) > _SHOWN else ""
            raise ConfigError(f"The pin {pin} cannot be met: {what} can only be {'; '.join(possible[:_SHOWN])}{more}.")
    common = set(range(len(options))).intersection(*left)
    if not common:
        for (a, (first, _)), (b, (second, _)) in itertools.combinations(enumerate(pins), 2):
            if not left[a] & left[b]:
                raise ConfigError(f"The pins {first} and {second} contradict each other: {what} cannot be both.")
        raise ConfigError(
            f"The pins {'; '.join(str(pin) for pin, _ in pins)} contradict each other at {what} together."
        )
    return [option for i, option in enumerate(options) if i in common]
