"""hidet 0.6.1 requires every symbolic tensor that no operator computes to be among a graph's inputs.

Weights by name (:func:`hidet_dist.weights.weight`) are symbolic, so that hidet computes nothing from missing data, but
they are not inputs. The analysis is corrected for the whole process. It also looks inputs up in a list, which takes
most of its time for a graph with many weights; here it gets a set.
"""

from __future__ import annotations

from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.impl import graph_impl

hidet_analyze = graph_impl.graph_analyze


def analyze(outputs: list[Tensor], stop_tensors: Any = None) -> tuple[list[Tensor], list[Operator], dict[Tensor, int]]:
    """Analyse a graph as hidet does, without counting weights among its free variables."""
    from hidet_dist.weights.named import is_weight  # lazy, since that module may be the one that imports hidet

    free, nodes, uses = hidet_analyze(outputs, stop_tensors=set(stop_tensors or ()))
    return [tensor for tensor in free if not is_weight(tensor)], nodes, uses


def install() -> None:
    """Accept weights that are not inputs of their graph from now on."""
    graph_impl.graph_analyze = analyze
