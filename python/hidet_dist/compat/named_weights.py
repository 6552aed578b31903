"""hidet 0.6.1 requires every symbolic tensor that no operator computes to be among a graph's inputs.

Weights by name (:func:`hidet_dist.weights.weight`) and states are symbolic, so that hidet computes nothing from missing
data, but they are not inputs. The analysis is replaced for the whole process. hidet's also looks inputs up in a list,
which takes most of its time for a graph with many weights, calls itself once per operator of the longest path, and asks
each tensor for its operator several times.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from hidet.graph import Operator, Tensor
from hidet.graph.impl import graph_impl

hidet_analyze = graph_impl.graph_analyze


def analyze(
    outputs: list[Tensor], stop_tensors: Iterable[Tensor] | None = None
) -> tuple[list[Tensor], list[Operator], dict[Tensor, int]]:
    """Analyse the graph that ends in ``outputs``, as hidet does, but count no weights and states as free variables.

    Returns
    -------
    free_variables: list of Tensor
        The symbolic tensors that no operator computes, without weights, states and ``stop_tensors``.
    operators: list of Operator
        The operators, each after those whose results it reads, in hidet's order.
    uses: dict of Tensor to int
        How often each tensor is read by an operator, or is an output.

    Raises
    ------
    ValueError
        When a tensor is not the output that its trace says.
    """
    # Lazy, since these modules may be the ones that import hidet.
    from hidet_dist.weights.named import is_weight
    from hidet_dist.weights.states import is_state

    stop = set(stop_tensors or ())

    def maker(x: Tensor) -> Operator | None:
        return x._trace[0] if x._trace and x not in stop else None

    ends = [op for op in map(maker, outputs) if op is not None]
    makers = _makers(ends, maker)
    readers = Counter(op for op in (*ends, *itertools.chain(*makers.values())) if op is not None)
    uses: dict[Tensor, int] = defaultdict(int)
    for y in (*(x for op in makers for x in op.inputs), *outputs):
        uses[y] += 1

    def read(op: Operator) -> bool:
        readers[op] -= 1
        return not readers[op]

    free: dict[Tensor, None] = {}
    operators: list[Operator] = []
    ready = [op for op in ends if read(op)]
    while ready:
        reader = ready.pop()
        operators.append(reader)
        for x, op in zip(reader.inputs, makers[reader], strict=True):
            if op is not None:
                if x is not op.outputs[x._trace[1]]:
                    raise ValueError(f"The trace of an input of {reader.name} is broken.")
                if read(op):
                    ready.append(op)
            elif x._storage is None and x not in stop and not x._trace and not is_weight(x) and not is_state(x):
                free[x] = None
    return list(free), operators[::-1], uses


def _makers(
    ends: Iterable[Operator], maker: Callable[[Tensor], Operator | None]
) -> dict[Operator, list[Operator | None]]:
    """Map the operators that ``ends`` depend on, in the order in which they are met, to those of their inputs."""
    makers: dict[Operator, list[Operator | None]] = {}
    for first in ends:
        if first in makers:
            continue
        makers[first] = [maker(x) for x in first.inputs]
        pending: list[Iterator[Operator | None]] = [iter(makers[first])]
        while pending:
            op = next((op for op in pending[-1] if op is not None and op not in makers), None)
            if op is None:
                pending.pop()
            else:
                makers[op] = [maker(x) for x in op.inputs]
                pending.append(iter(makers[op]))
    return makers


def install() -> None:
    """Accept weights and states that are not inputs of their graph from now on."""
    graph_impl.graph_analyze = analyze
