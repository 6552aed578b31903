"""What is asked of a search: one graph or several that share weights, the machine, and the options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hidet

from hidet_dist.cost.model import CostModel
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.rules.rule import OfferedParts, RuleTable
from hidet_dist.search.formulation.formulate import Allow
from hidet_dist.search.options import SearchOptions
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.view import graph_symbols

Specs = Sequence[TensorShardSpec | None] | None


@dataclass(frozen=True)
class FamilyMember:
    """A graph of several that share weights, and what its plan must satisfy.

    Attributes
    ----------
    graph: the graph in normal form.
    frequency: the factor of its predicted time in the sum, above 0.
    names: the user's names of its tensors: a hidet Module, or a mapping of names to tensors.
    pins, input_specs, output_specs: as in :class:`hidet_dist.search.options.SearchOptions`.
    same: weights of the graph that are equal to weights of other members, by tensor; see
        :func:`hidet_dist.weights.equality.equal_weights`. A weight that is the same tensor in both need not be there.
    symbols: the declared sizes of its symbolic dims, by name; those of the options when not given.
    """

    graph: NormalGraph
    frequency: float = 1.0
    names: Any = None
    pins: Mapping[str, Any] | None = None
    input_specs: Specs = None
    output_specs: Specs = None
    same: Mapping[hidet.Tensor, hidet.Tensor] = field(default_factory=dict)
    symbols: Mapping[str, SymbolSize] | None = None

    def __post_init__(self) -> None:
        if not (self.frequency > 0 and math.isfinite(self.frequency)):
            raise ConfigError(f"The frequency of a graph must be a number above 0; got {self.frequency!r}.")

    def declared(self, options: SearchOptions) -> dict[str, SymbolSize]:
        """Select the declared sizes of the graph's own symbolic dims."""
        known = options.symbols if self.symbols is None else self.symbols
        return {name: known[name] for name in graph_symbols(self.graph) if name in known}


@dataclass(frozen=True)
class SearchRequest:
    """What is asked of a search; the arguments of :func:`hidet_dist.search.search` describe it."""

    graphs: NormalGraph | Sequence[FamilyMember]
    cluster: Cluster
    options: SearchOptions
    rules: RuleTable | None = None
    offered: OfferedParts | None = None
    allow: Allow | None = None
    cost_model: CostModel | None = None

    @property
    def graph(self) -> NormalGraph:
        """The only graph."""
        assert isinstance(self.graphs, NormalGraph)
        return self.graphs

    @property
    def members(self) -> Sequence[FamilyMember]:
        """The graphs that share weights, or the only one, each with the sizes of its own symbolic dims."""
        given = [FamilyMember(self.graphs)] if isinstance(self.graphs, hidet.FlowGraph) else self.graphs
        return [replace(member, symbols=member.declared(self.options)) for member in given]

    def on(self, cluster: Cluster) -> SearchRequest:
        """The same for another machine."""
        return replace(self, cluster=cluster)
