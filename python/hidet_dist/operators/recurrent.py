"""Recurrent layers, unrolled: one step of the graph for each element of the sequence."""

from __future__ import annotations

from hidet import ops
from hidet.graph import Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp

from hidet_dist.operators import elementwise


def _by_transposed(x: Tensor, weight: Tensor) -> Tensor:
    return MatmulOp(x, weight, transpose_b=True).outputs[0]


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return ops.strided_slice(x, [start], [stop], [0])


def _start(x: Tensor, first: Tensor | None, size: int) -> Tensor:
    return ops.full([x.shape[1], size], 0.0, x.dtype, x.device) if first is None else first


def _steps(x: Tensor, reverse: bool) -> list[int]:
    steps = list(range(int(x.shape[0])))
    return steps[::-1] if reverse else steps


def _stacked(outputs: dict[int, Tensor]) -> Tensor:
    rows = [ops.unsqueeze(outputs[step], 0) for step in sorted(outputs)]
    return rows[0] if len(rows) == 1 else ops.concat(rows, 0)


def lstm(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of a long short-term memory (Hochreiter and Schmidhuber 1997), its gates in ONNX's order.

    Parameters
    ----------
    x: Tensor
        [steps, batch, inputs].
    weight, recurrence: Tensor
        [4 * size, inputs] and [4 * size, size]: of the input gate, the output gate, the forget gate and the cell.
    bias: Tensor, optional
        [8 * size]: those of the weight, then those of the recurrence.
    hidden, cell: Tensor, optional
        [batch, size], the states before the first step; zeros unless given.

    Returns
    -------
    The hidden state after each step [steps, batch, size], and both states after the last one.
    """
    size = int(recurrence.shape[1])
    h, c = _start(x, hidden, size), _start(x, cell, size)
    inputs = _by_transposed(x, weight)
    if bias is not None:
        inputs = elementwise.add(inputs, elementwise.add(_rows(bias, 0, 4 * size), _rows(bias, 4 * size, 8 * size)))
    outputs: dict[int, Tensor] = {}
    for step in _steps(x, reverse):
        own = ops.squeeze(_rows(inputs, step, step + 1), [0])
        gates = elementwise.add(own, _by_transposed(h, recurrence))
        i, o, f, g = (ops.strided_slice(gates, [n * size], [(n + 1) * size], [1]) for n in range(4))
        kept = elementwise.mul(elementwise.sigmoid(f), c)
        c = elementwise.add(kept, elementwise.mul(elementwise.sigmoid(i), elementwise.tanh(g)))
        h = elementwise.mul(elementwise.sigmoid(o), elementwise.tanh(c))
        outputs[step] = h
    return _stacked(outputs), h, c


def gru(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    reverse: bool = False,
    linear_before_reset: bool = True,
) -> tuple[Tensor, Tensor]:
    """One direction of a gated recurrent unit (Cho et al. 2014), its gates in ONNX's order.

    Parameters
    ----------
    x: Tensor
        [steps, batch, inputs].
    weight, recurrence: Tensor
        [3 * size, inputs] and [3 * size, size]: of the update gate, the reset gate and the hidden state.
    bias: Tensor, optional
        [6 * size]: those of the weight, then those of the recurrence.
    hidden: Tensor, optional
        [batch, size], the state before the first step; zeros unless given.
    linear_before_reset: bool
        Whether the reset gate is applied to the product with the recurrence, as PyTorch does, or to the state before.

    Returns
    -------
    The hidden state after each step [steps, batch, size], and that after the last one.
    """
    size = int(recurrence.shape[1])
    h = _start(x, hidden, size)
    inputs = _by_transposed(x, weight)
    own_bias = None if bias is None else _rows(bias, 3 * size, 6 * size)
    if bias is not None:
        inputs = elementwise.add(inputs, _rows(bias, 0, 3 * size))
    outputs: dict[int, Tensor] = {}

    def part(gates: Tensor, number: int) -> Tensor:
        return ops.strided_slice(gates, [number * size], [(number + 1) * size], [1])

    for step in _steps(x, reverse):
        own = ops.squeeze(_rows(inputs, step, step + 1), [0])
        back = _by_transposed(h, recurrence)
        back = back if own_bias is None else elementwise.add(back, own_bias)
        update = elementwise.sigmoid(elementwise.add(part(own, 0), part(back, 0)))
        reset = elementwise.sigmoid(elementwise.add(part(own, 1), part(back, 1)))
        if linear_before_reset:
            remembered = elementwise.mul(reset, part(back, 2))
        else:
            remembered = _by_transposed(elementwise.mul(reset, h), _rows(recurrence, 2 * size, 3 * size))
            if own_bias is not None:
                remembered = elementwise.add(remembered, _rows(own_bias, 2 * size, 3 * size))
        new = elementwise.tanh(elementwise.add(part(own, 2), remembered))
        h = elementwise.add(new, elementwise.mul(update, elementwise.sub(h, new)))
        outputs[step] = h
    return _stacked(outputs), h
