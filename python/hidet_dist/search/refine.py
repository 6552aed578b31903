"""Finer meshes: an axis is cut in two, for graphs with fewer attention heads than the axis has devices.

Two heads of keys and values cannot be split over four devices, but over two groups of two, where a group holds each
head. No spec of the mesh [gpu=4] says so; on [gpu_0=2, gpu_1=2] it is an ordinary spec. A finer mesh has the same
devices with the same ranks, and a group over both halves of an axis is the ring of the whole axis. So every plan of the
given mesh is a plan of the finer mesh too, with the same predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search.formulation.parts import heads_of
from hidet_dist.spec import DeviceMesh, StagePlan, TensorShardSpec
from hidet_dist.spec.mesh import MAX_AXES
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class Refinement:
    """The cluster with the finer mesh, and the axes in it of each axis of the given mesh, major to minor."""

    cluster: Cluster
    axes: tuple[tuple[int, ...], ...]

    def translated(self, spec: TensorShardSpec) -> TensorShardSpec:
        """Translate a spec of the given mesh to the finer mesh: the same shards on the same ranks."""
        return TensorShardSpec(
            tuple(tuple(new for axis in axes for new in self.axes[axis]) for axes in spec.mesh_axes_per_dim)
        )

    def translated_all(self, specs: Sequence[TensorShardSpec | None] | None) -> list[TensorShardSpec | None] | None:
        """Translate each given spec to the finer mesh."""
        return None if specs is None else [None if spec is None else self.translated(spec) for spec in specs]


def cluster_of(stage: StagePlan, graph: NormalGraph, cluster: Cluster, rules: RuleTable | None = None) -> Cluster:
    """Select the cluster that a stage is planned for: the given one, or that with the finer mesh or with shares."""
    if stage.mesh.is_uneven() and stage.mesh.without_shares() == cluster.mesh:
        return replace(cluster, mesh=stage.mesh)
    finer = None if stage.mesh == cluster.mesh else refine(GraphView(graph), cluster, rules)
    return cluster if finer is None else finer.cluster


def refine(view: GraphView, cluster: Cluster, rules: RuleTable | None = None) -> Refinement | None:
    """Make a finer mesh that may have better plans for the graph; None if there is none.

    An axis of n devices is cut into (g, n / g). Here g is the greatest common divisor of n and a number of heads that n
    does not divide: 12 heads on 8 devices make (4, 2). Numbers of heads are the extents into which a reshape splits a
    dim. Other extents that n does not divide are not considered: mostly the axis can split another dim instead. Rules
    are shared with the table ``rules``.
    """
    extents = heads_of([view], rules)
    shape: list[int] = []
    names: list[str] = []
    links = []
    axes: list[tuple[int, ...]] = []
    mesh = cluster.mesh
    if mesh.is_uneven():
        return None
    for n, name, link in zip(mesh.shape, mesh.axis_names, cluster.links, strict=True):
        g = max((math.gcd(extent, n) for extent in extents if extent % n), default=1)
        parts = (g, n // g) if g > 1 else (n,)
        axes.append(tuple(range(len(shape), len(shape) + len(parts))))
        shape += parts
        names += [f"{name}_{i}" for i in range(2)] if len(parts) > 1 else [name]
        links += [link] * len(parts)
    if len(shape) == mesh.ndim or len(shape) > MAX_AXES or len(set(names)) < len(names):
        return None
    return Refinement(Cluster(DeviceMesh(tuple(shape), tuple(names)), tuple(links), cluster.device), tuple(axes))
