"""Published results of other searches, under their cost models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hidet
import pytest
from hidet.graph import Operator

from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.reshard import Conversion, Step, cheapest_conversion, walk
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, OpShardSpec, ReduceFn, TensorShardSpec
from hidet_dist.spec.partial import split_of

FREE = Device("free", {"default": 1e15}, 1e15, 2**62, 0.0)


class CommunicationOnly:
    """Operators cost nothing, and weights lie as they are wanted; the rest is for a subclass to say."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster

    def fused(self, view):
        return {}

    def operator(self, op, choice) -> float:
        return 0.0

    def absorbed(self, op, choice, nbytes) -> float:
        return 0.0

    def split(self, nbytes) -> float:
        return 0.0

    def seconds(self, shape: Sequence[int], source: TensorShardSpec, target: TensorShardSpec, steps) -> float:
        raise NotImplementedError

    def conversion(self, shape, dtype, source, target) -> Conversion:
        found = cheapest_conversion(shape, dtype, source, target, self.cluster)
        return replace(found, seconds=self.seconds(shape, source, target, found.steps))

    def conversions(self, shape, dtype, specs):
        return tuple(tuple(self.conversion(shape, dtype, s, t).seconds for t in specs) for s in specs)


class Slapo(CommunicationOnly):
    """The rules of Slapo's autosharder as of its first sample (awslabs/slapo, pull request 96, solver.py).

    A tensor has V elements in its last two dims, and lies as RR, RS or SR there. On p devices, RS and SR become RR for
    V/p, each other for V/p - V/p^2, and what is RR is split for nothing. RS x SR is all-reduced for V of its result.
    """

    def seconds(self, shape, source, target, steps) -> float:
        if len(shape) < 3 or source == target or source.is_replicated:
            return 0.0
        elements, p = shape[-1] * shape[-2], self.cluster.mesh.size
        return elements / p if target.is_replicated else elements / p - elements / p**2

    def reduce(self, shape, dtype, partial, fns) -> float:
        return float(shape[-1] * shape[-2])


def slapo_choices(op: Operator, spec: OpShardSpec) -> bool:
    """RR x RS, RS x SR with an all-reduce, or SR x RR for matrices; the batch is never split."""
    kinds = {fn.kind for fns in spec.reduce_fns for fn in fns}
    batched = any(own.ndim > 2 and own.mesh_axes_per_dim[0] for own in (*spec.in_specs, *spec.out_specs))
    return not batched and "reduce_scatter" not in kinds and not (op.name == "Matmul" and spec.is_replicated)


def test_slapos_two_layer_mlp() -> None:
    """Batch 8, sequence 1024, hidden 1024 -> 4096 -> 1024 on 8 devices: the optimum is 131072, both layers SR x RR."""
    batch, seq, hidden, p = 8, 1024, 1024, 8
    x = hidet.symbol([batch, seq, hidden], "float32", "cpu")
    up = hidet.distributed.weight("fc1.weight", [hidden, 4 * hidden])
    down = hidet.distributed.weight("fc2.weight", [4 * hidden, hidden])
    y = hidet.ops.matmul(hidet.ops.gelu(hidet.ops.matmul(x, up)), down)
    cluster = Cluster(DeviceMesh((p,)), (Link(0.0, 1.0),), FREE)
    found = search(
        normalize(hidet.trace_from(y, [x])), cluster, cost_model=Slapo(cluster), allow=slapo_choices, solver_gap=1e-9
    )
    assert found.plan.seconds == found.bound_seconds == seq * hidden / p == 131072
    stage = found.plan.stages[0]
    for number in (0, 2):
        assert str(stage.operators[number].spec) == "(R, S0, R), (R, R) -> (R, S0, R)"
    assert [str(weight.spec) for weight in stage.weights] == ["(R, R)"] * 2
    assert found.plan.collectives() == {"all_gather": 1}
    # The autosharder's other plans, by pins: columns then rows with an all-reduce of V, and columns with two gathers.
    for pins, seconds in (
        ({"fc1.weight": "(R, S0)", "op:0": "?, (R, S0) -> ?", "op:2": "?, (S0, R) -> ?"}, seq * hidden),
        ({"op:0": "?, (R, S0) -> ?", "op:2": "?, (R, S0) -> ?"}, (4 * seq * hidden + seq * hidden) / p),
    ):
        other = search(
            normalize(hidet.trace_from(y, [x])),
            cluster,
            cost_model=Slapo(cluster),
            allow=slapo_choices,
            solver_gap=1e-9,
            pins=pins,
        )
        assert other.plan.seconds == seconds


class Alpa(CommunicationOnly):
    """Alpa's alpha-beta costs of collectives (alpa-projects/alpa, alpa/shard_parallel and device_mesh.py).

    For n devices along a mesh axis and b bytes: all-gather alpha + beta (n-1)/n b + 0.1, all-reduce
    alpha + 2 beta (n-1)/n b + 0.01, reduce-scatter alpha + beta (n-1)/n b + 0.001, all-to-all
    alpha + beta (n-1)/n^2 b n/2 + 0.001. Slices are free.
    """

    def __init__(self, cluster: Cluster, alpha: Sequence[float], beta: Sequence[float]):
        super().__init__(cluster)
        self.alpha, self.beta = alpha, beta

    def step(self, step: Step, nbytes: float) -> float:
        """A step over several axes is one over the slowest of them."""
        n = self.cluster.mesh.group_size(step.mesh_axes)
        alpha = max(self.alpha[axis] for axis in step.mesh_axes)
        beta = max(self.beta[axis] for axis in step.mesh_axes)
        factor, more = {
            "slice": (0.0, -alpha),
            "all_gather": (1.0, 0.1),
            "all_reduce": (2.0, 0.01),
            "reduce_scatter": (1.0, 0.001),
            "all_to_all": (0.5, 0.001),
        }[step.kind]
        return alpha + factor * beta * (n - 1) / n * nbytes + more

    def seconds(self, shape, source, target, steps) -> float:
        total, mesh = 0.0, self.cluster.mesh
        for step, layout in zip(steps, walk(steps, source, shape, mesh), strict=True):
            after = split_of(layout)
            groups = min(source.num_shards(mesh), after.num_shards(mesh))  # each has its part of the tensor whole
            total += self.step(step, 4 * shape[0] * shape[1] / groups)
            source = after
        return total

    def reduce(self, shape, dtype, partial, fns: Sequence[ReduceFn]) -> float:
        nbytes = 4 * shape[0] * shape[1] / partial.num_shards(self.cluster.mesh)
        return sum(self.step(Step.of(fn), nbytes) for fn in fns)

    def all_reduce(self, nbytes: float, axis: int) -> float:
        return self.step(Step("all_reduce", (axis,), op="sum"), nbytes)


def mlp(layers: int, batch: int, hidden: int) -> hidet.FlowGraph:
    """Alpa's test case: ``layers`` square matrices with a ReLU after each but the last."""
    x = y = hidet.symbol([batch, hidden], "float32", "cpu")
    for number in range(layers):
        y = hidet.ops.matmul(y, hidet.distributed.weight(f"dense_{number}", [hidden, hidden]))
        if number < layers - 1:
            y = hidet.ops.relu(y)
    return normalize(hidet.trace_from(y, [x]))


LAYERS = 6


def alpa(mesh: tuple[int, ...], beta: Sequence[float] = (1.0, 1.0)) -> tuple[Cluster, Alpa]:
    cluster = Cluster(DeviceMesh(mesh), (Link(1.0, 1.0),) * len(mesh), FREE)
    return cluster, Alpa(cluster, [1.0] * len(mesh), beta)


@pytest.mark.parametrize("axis", [0, 1])
def test_alpas_mlp_by_model_parallelism(axis: int) -> None:
    """Small batch: weights are split by columns and rows in turn, with one all-reduce a matrix split by rows."""
    batch, hidden, ways = 32, 256, 4
    cluster, model = alpa((ways, 1) if axis == 0 else (1, ways))
    pins = {f"dense_{n}": f"(R, S{axis})" if n % 2 == 0 else f"(S{axis}, R)" for n in range(LAYERS)}
    found = search(mlp(LAYERS, batch, hidden), cluster, cost_model=model, solver_gap=1e-9, pins=pins)
    assert found.plan.collectives() == {"all_reduce": LAYERS // 2}
    assert found.plan.seconds == pytest.approx(LAYERS // 2 * model.all_reduce(batch * hidden * 4, axis))
    for op in found.plan.stages[0].operators:
        if op.operator == "Matmul":
            rows = any(op.spec.reduce_fns)
            assert str(op.spec.in_specs[1]) == (f"(S{axis}, R)" if rows else f"(R, S{axis})")
    assert [str(weight.spec) for weight in found.plan.stages[0].weights] == list(pins.values())


def test_alpas_mlp_by_data_parallelism() -> None:
    """Rows of the batch arrive and leave split: every weight is whole, and the forward pass communicates nothing."""
    cluster, model = alpa((4,))
    pins = {"x0": "(S0, R)", "y0": "(S0, R)"}
    found = search(mlp(LAYERS, 256, 32), cluster, cost_model=model, solver_gap=1e-9, pins=pins)
    assert (found.plan.seconds, found.plan.collectives()) == (0.0, {})
    assert all(weight.spec.is_replicated for weight in found.plan.stages[0].weights)
    assert all(op.spec.in_specs[0] == TensorShardSpec.parse("(S0, R)") for op in found.plan.stages[0].operators)


def test_alpas_mlp_on_two_mesh_axes() -> None:
    """The batch over one axis, the matrices over the other, which is ten times as fast."""
    batch, hidden = 256, 32
    cluster, model = alpa((2, 2), (1.0, 0.1))
    pins = {f"dense_{n}": "(R, S1)" if n % 2 == 0 else "(S1, R)" for n in range(LAYERS)}
    ends = {"x0": "(S0, R)", "y0": "(S0, R)"}
    own = model.all_reduce(batch * hidden * 4 / 2, 1)
    # Weights of 4 KiB would be gathered rather than activations of 32 KiB reduced, if the operators were not pinned.
    forced = {f"op:Matmul#{n}": "?, (R, S1) -> ?" if n % 2 == 0 else "?, (S1, R) -> ?" for n in range(LAYERS)}
    found = search(
        mlp(LAYERS, batch, hidden), cluster, cost_model=model, solver_gap=1e-9, pins={**pins, **ends, **forced}
    )
    assert found.plan.collectives() == {"all_reduce": LAYERS // 2}
    assert found.plan.seconds == pytest.approx(LAYERS // 2 * own)
