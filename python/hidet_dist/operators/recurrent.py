"""Recurrent layers, unrolled: one step of the graph for each element of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hidet import ops
from hidet.graph import Tensor

from hidet_dist.operators import elementwise, shaping
from hidet_dist.operators.products import linear
from hidet_dist.spec.extents import extents_of

Biases = tuple[Tensor, Tensor]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LstmVariant:
    """How a long short-term memory differs from the common one.

    Attributes
    ----------
    peepholes: pair of Tensor, or None
        [size] for each of the gates i, o and f: what the cell adds to them, times itself (Gers and Schmidhuber 2000);
        that after the step to the output's gate.
    couples: bool
        Whether the forget gate is 1 less the input gate.
    activations: tuple of callable
        Those of the gates, of the cell's new values, and of the cell where the output is made.
    """

    peepholes: tuple[Tensor, Tensor, Tensor] | None = None
    couples: bool = False
    activations: tuple[Activation, Activation, Activation] = (elementwise.sigmoid, elementwise.tanh, elementwise.tanh)

    def gate(self, x: Tensor, cell: Tensor, letter: str) -> Tensor:
        """Compute a gate, one of i, o and f, with what the cell adds to it."""
        if self.peepholes is not None:
            x = elementwise.add(x, elementwise.mul(self.peepholes["iof".index(letter)], cell))
        return self.activations[0](x)


_COMMON = LstmVariant()


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return ops.strided_slice(x, [start], [stop], [0])


def _gates(x: Tensor, size: int, order: str) -> dict[str, Tensor]:
    """The columns of each gate, ``size`` of them, by its letter."""
    return {gate: ops.strided_slice(x, [n * size], [(n + 1) * size], [1]) for n, gate in enumerate(order)}


def _start(x: Tensor, first: Tensor | None, size: int) -> Tensor:
    return ops.full([x.shape[1], size], 0.0, x.dtype, x.device) if first is None else first


def _steps(x: Tensor, reverse: bool) -> list[int]:
    count = extents_of(x)[0]
    if not isinstance(count, int):
        raise ValueError(f"A recurrent layer over {count} steps cannot be unrolled: their number must be known.")
    return list(range(count))[:: -1 if reverse else 1]


def _in_order(outputs: dict[int, Tensor]) -> Tensor:
    return shaping.stack([outputs[step] for step in sorted(outputs)], 0)


def lstm(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    biases: Biases | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    *,
    order: str,
    projection: Tensor | None = None,
    reverse: bool = False,
    variant: LstmVariant = _COMMON,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of a long short-term memory (Hochreiter and Schmidhuber 1997).

    Parameters
    ----------
    x: Tensor
        [steps, batch, inputs].
    weight, recurrence: Tensor
        [4 * size, inputs] and [4 * size, outputs]; outputs are as many as ``size`` without a projection.
    biases: pair of Tensor, optional
        [4 * size] each: that of the weight and that of the recurrence.
    hidden, cell: Tensor, optional
        [batch, outputs] and [batch, size], the states before the first step; zeros unless given.
    order: str
        The order of the gates in the rows of all of these: ``i`` for input, ``f`` for forget, ``o`` for output and
        ``g`` for the cell; ``"iofg"`` in ONNX and ``"ifgo"`` in PyTorch.
    projection: Tensor, optional
        [outputs, size]: makes the hidden state of the gated cell (Sak et al. 2014).
    reverse: bool
        Whether the last step comes first.
    variant: LstmVariant
        How the layer differs from the common one.

    Returns
    -------
    tuple of Tensor
        The hidden state after each step [steps, batch, outputs], and both states after the last one.

    Raises
    ------
    ValueError
        When the number of steps is symbolic.
    """
    size = int(weight.shape[0]) // 4
    h, c = _start(x, hidden, int(recurrence.shape[1])), _start(x, cell, size)
    inputs = linear(x, weight, None if biases is None else elementwise.add(*biases))
    outputs: dict[int, Tensor] = {}
    for step in _steps(x, reverse):
        step_inputs = shaping.select(inputs, 0, step)
        gates = _gates(elementwise.add(step_inputs, linear(h, recurrence)), size, order)
        new = variant.gate(gates["i"], c, "i")
        kept = elementwise.rsub(new, 1.0) if variant.couples else variant.gate(gates["f"], c, "f")
        made = variant.activations[1](gates["g"])
        c = elementwise.add(elementwise.mul(kept, c), elementwise.mul(new, made))
        h = elementwise.mul(variant.gate(gates["o"], c, "o"), variant.activations[2](c))
        h = h if projection is None else linear(h, projection)
        outputs[step] = h
    return _in_order(outputs), h, c


def rnn(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    biases: Biases | None = None,
    hidden: Tensor | None = None,
    *,
    activation: Activation = elementwise.tanh,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """One direction of a plain recurrent layer (Elman 1990).

    The arguments are those of :func:`lstm`, for one gate instead of four. Returns the hidden state after each step
    [steps, batch, size], and that after the last one. Raises ValueError when the number of steps is symbolic.
    """
    h = _start(x, hidden, int(recurrence.shape[1]))
    inputs = linear(x, weight, None if biases is None else elementwise.add(*biases))
    outputs: dict[int, Tensor] = {}
    for step in _steps(x, reverse):
        h = activation(elementwise.add(shaping.select(inputs, 0, step), linear(h, recurrence)))
        outputs[step] = h
    return _in_order(outputs), h


def gru(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    biases: Biases | None = None,
    hidden: Tensor | None = None,
    *,
    order: str,
    reverse: bool = False,
    linear_before_reset: bool = True,
    activations: tuple[Activation, Activation] = (elementwise.sigmoid, elementwise.tanh),
) -> tuple[Tensor, Tensor]:
    """One direction of a gated recurrent unit (Cho et al. 2014).

    Parameters
    ----------
    x: Tensor
        [steps, batch, inputs].
    weight, recurrence: Tensor
        [3 * size, inputs] and [3 * size, size].
    biases: pair of Tensor, optional
        [3 * size] each: that of the weight and that of the recurrence.
    hidden: Tensor, optional
        [batch, size], the state before the first step; zeros unless given.
    order: str
        The order of the gates in the rows of all of these: ``z`` for update, ``r`` for reset and, last, ``n`` for the
        new state; ``"zrn"`` in ONNX and ``"rzn"`` in PyTorch.
    reverse: bool
        Whether the last step comes first.
    linear_before_reset: bool
        Whether the reset gate is applied to the product with the recurrence, as PyTorch does, or to the state before.
    activations: tuple of callable
        Those of the gates, and of the new state.

    Returns
    -------
    tuple of Tensor
        The hidden state after each step [steps, batch, size], and that after the last one.

    Raises
    ------
    ValueError
        When the number of steps is symbolic.
    """
    size = int(recurrence.shape[1])
    h = _start(x, hidden, size)
    own_bias, back_bias = (None, None) if biases is None else biases
    inputs = linear(x, weight, own_bias)
    outputs: dict[int, Tensor] = {}
    for step in _steps(x, reverse):
        gates = _gates(shaping.select(inputs, 0, step), size, order)
        back = _gates(linear(h, recurrence, back_bias), size, order)
        update = activations[0](elementwise.add(gates["z"], back["z"]))
        reset = activations[0](elementwise.add(gates["r"], back["r"]))
        if linear_before_reset:
            remembered = elementwise.mul(reset, back["n"])
        else:
            bias = None if back_bias is None else _rows(back_bias, 2 * size, 3 * size)
            remembered = linear(elementwise.mul(reset, h), _rows(recurrence, 2 * size, 3 * size), bias)
        new = activations[1](elementwise.add(gates["n"], remembered))
        h = elementwise.add(new, elementwise.mul(update, elementwise.sub(h, new)))
        outputs[step] = h
    return _in_order(outputs), h
