"""hidet 0.6.1 takes every symbolic tensor that nothing computes for an input, and refuses a graph that lacks it there.

Weights that are a name and a shape (:func:`hidet_dist.weights.weight`) are symbolic, so that nothing is computed from
data that is not there, but they are no inputs. Set right for the whole process.
"""

from __future__ import annotations

from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.impl import graph_impl

hidet_analyze = graph_impl.graph_analyze


def analyze(outputs: list[Tensor], stop_tensors: Any = None) -> tuple[list[Tensor], list[Operator], dict[Tensor, int]]:
    """Analyse a graph as hidet does, without counting weights among its free variables."""
    from hidet_dist.weights.named import is_weight  # which may be what is importing hidet, and this with it

    free, nodes, uses = hidet_analyze(outputs, stop_tensors=stop_tensors)
    return [tensor for tensor in free if not is_weight(tensor)], nodes, uses


def install() -> None:
    """Leave weights out of graphs' inputs from now on."""
    graph_impl.graph_analyze = analyze
