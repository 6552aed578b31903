"""Costs of the parts of a plan, in seconds, which the search adds up.

An element-wise operator that hidet fuses into a neighbour's kernel (:mod:`hidet_dist.cost.fusion`) costs no launch, and
no pass over the tensor between the two. The other bytes that it moves, and its arithmetic, are added to the neighbour's
roofline. A conversion or a reduce function between the two *splits* them into two kernels, which costs a launch and a
pass: the tensor is written and read once more. Of a kernel of several operators, such as attention, the last
one costs the launch. Each costs the bytes that the kernel reads or writes for it. Where their sharding breaks the
kernel up, they cost what they cost apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from hidet.graph import Operator

from hidet_dist.cost.dispatch import dispatch_seconds
from hidet_dist.cost.fusion import (
    Between,
    Fused,
    Fusions,
    Member,
    fused_operators,
    sharing,
    splits_rows,
)
from hidet_dist.cost.work import MEASURED_DTYPES, local_work, work_of
from hidet_dist.machine import Cluster, Device
from hidet_dist.reshard import Conversion, Element, cheapest_conversion, conversion_seconds, reduce_seconds
from hidet_dist.rules.rule import Choice
from hidet_dist.spec import DeviceMesh, OpShardSpec, ReduceFn, TensorShardSpec
from hidet_dist.view import GraphView


class CostModel(Protocol):
    """The cost of each part of a plan, in seconds. Shapes are those of whole tensors, in elements."""

    def fused(self, view: GraphView) -> Fusions:
        """Map the numbers of operators to how they share kernels; empty if the model ignores fusion."""
        ...

    def operator(self, op: Operator, choice: Choice) -> float:
        """Predict the seconds of the local operator as a separate kernel, without its reduce functions."""
        ...

    def absorbed(
        self, op: Operator, choice: Choice, spared_bytes: int, launches: bool = False, work: str | None = None
    ) -> float:
        """Predict the seconds that the local operator adds to a kernel with others.

        ``spared_bytes`` are those that the kernel does not move although separate kernels would. ``launches``: the
        seconds of the kernel's launch are added. ``work`` is the class of a kernel of several operators; None for the
        operator's own.
        """
        ...

    def split(self, nbytes: int) -> float:
        """Predict the seconds to add when a fused operator needs a separate kernel; ``nbytes`` pass between the two."""
        ...

    def reduce(self, shape: Sequence[int], dtype: Element, partial: TensorShardSpec, fns: Sequence[ReduceFn]) -> float:
        """Predict the seconds of the reduce functions of a partial output in the spec ``partial``."""
        ...

    def dispatch(self, op: Operator, spec: OpShardSpec) -> float:
        """Predict the seconds of an operator's dispatch, which are also those of the first reduce function."""
        ...

    def conversion(
        self, shape: Sequence[int], dtype: Element, source: TensorShardSpec, target: TensorShardSpec
    ) -> Conversion:
        """Find the cheapest conversion of a tensor from one spec to another."""
        ...

    def conversions(
        self, shape: Sequence[int], dtype: Element, specs: Sequence[TensorShardSpec]
    ) -> tuple[tuple[float, ...], ...]:
        """Predict the seconds of :meth:`conversion` between each two specs: sources (rows) by targets (columns)."""
        ...


class PredictedCost:
    """The cost model of a described machine: a roofline or measured kernels for operators, links for collectives."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster

    def fused(self, view: GraphView) -> Fusions:
        """Map the numbers of operators to how they share kernels on the machine's devices."""
        device = self.cluster.device
        return fused_operators(view, device.fusion, device.multiprocessors)

    def operator(self, op: Operator, choice: Choice) -> float:
        """Predict the seconds of the local operator as a separate kernel, without its reduce functions."""
        moved = choice.read_bytes + choice.written_bytes
        if not moved:
            return 0.0
        device = self._device(choice)
        measured = self._measured(op, choice)
        if measured is not None:
            return device.launch_seconds + measured
        return device.operator_seconds(choice.operations, moved, op.outputs[0].dtype.name)

    def absorbed(
        self, op: Operator, choice: Choice, spared_bytes: int, launches: bool = False, work: str | None = None
    ) -> float:
        """Predict the seconds that the local operator adds to a kernel with others.

        ``spared_bytes`` are subtracted from the bytes moved: for a tensor that passes to a neighbour in registers, both
        its passes. ``launches``: the seconds of the kernel's launch are added. ``work`` is the class of a kernel of
        several operators; the operator's own class applies where it was not measured.
        """
        moved = choice.read_bytes + choice.written_bytes
        device = self._device(choice)
        launch = device.launch_seconds if launches else 0.0
        if not moved:
            return launch
        measured = self._measured(op, choice, spared_bytes, work)
        if measured is not None:
            return launch + measured
        rest = max(0, moved - spared_bytes)
        seconds = device.operator_seconds(choice.operations, rest, op.outputs[0].dtype.name)
        return launch + max(0.0, seconds - device.launch_seconds)

    def local(self, op: Operator, sizes: Mapping[str, int]) -> float:
        """Predict the seconds of an operator of a sharded program, with local shapes, at given local symbolic sizes."""
        work, device, dtype = local_work(op, sizes), self.cluster.device, op.outputs[0].dtype.name
        measured = device.kernel_seconds(work) if device.kernels and dtype in MEASURED_DTYPES else None
        if measured is not None:
            return device.launch_seconds + measured
        return device.operator_seconds(work.operations, work.moved_bytes, dtype)

    def _measured(
        self, op: Operator, choice: Choice, spared_bytes: int | None = None, shared: str | None = None
    ) -> float | None:
        """Predict a kernel's seconds by its measured class, without its launch; None if the class was not measured."""
        device = self._device(choice)
        if not device.kernels or op.outputs[0].dtype.name not in MEASURED_DTYPES:
            return None
        shared = shared if shared in device.kernels else None
        return device.kernel_seconds(work_of(op, choice, self.cluster.mesh, spared_bytes, shared, device.fusion))

    def _device(self, choice: Choice) -> Device:
        """Return the device that does a choice's work: the one at its coordinate, or one as slow as all of them."""
        return self.cluster.device if choice.coordinate is None else self.cluster.device_at(choice.coordinate)

    def split(self, nbytes: int) -> float:
        """Predict the seconds to add when a fused operator needs a separate kernel: a launch and a pass."""
        return self.cluster.copy_seconds(nbytes)

    def reduce(self, shape: Sequence[int], dtype: Element, partial: TensorShardSpec, fns: Sequence[ReduceFn]) -> float:
        """Predict the seconds of the reduce functions of a partial output in the spec ``partial``."""
        return reduce_seconds(shape, dtype, partial, fns, self.cluster)

    def dispatch(self, op: Operator, spec: OpShardSpec) -> float:
        """Predict the seconds of an operator's dispatch, which are also those of the first reduce function."""
        return dispatch_seconds(op, spec, self.cluster)

    def conversion(
        self, shape: Sequence[int], dtype: Element, source: TensorShardSpec, target: TensorShardSpec
    ) -> Conversion:
        """Find the cheapest conversion of a tensor from one spec to another."""
        return cheapest_conversion(shape, dtype, source, target, self.cluster)

    def conversions(
        self, shape: Sequence[int], dtype: Element, specs: Sequence[TensorShardSpec]
    ) -> tuple[tuple[float, ...], ...]:
        """Predict the seconds of :meth:`conversion` between each two specs: sources (rows) by targets (columns)."""
        return conversion_seconds(shape, dtype, specs, specs, self.cluster)


def reduction_seconds(model: CostModel, op: Operator, choice: Choice) -> float:
    """Predict the seconds of all reduce functions of an operator, and of its dispatch."""
    spec = choice.spec
    seconds = 0.0 if spec.dispatch is None else model.dispatch(op, spec)
    for o, y in enumerate(op.outputs):
        partial, fns = spec.reductions(o)
        if fns:
            seconds += model.reduce(tuple(int(size) for size in y.shape), y.dtype, partial, fns)
    return seconds


def compute_seconds(
    model: CostModel, view: GraphView, number: int, choice: Choice, fused: Fused | Member | None, mesh: DeviceMesh
) -> float:
    """Predict the seconds of an operator's computation, within a kernel with others if it is ``fused``.

    Where devices do unequal parts of it, these are the seconds of the device that takes longest.
    """
    op = view.operators[number]
    of_devices = choice.devices or (choice,)
    fused = sharing(fused, choice.spec)
    if fused is None:
        return max(model.operator(op, one) for one in of_devices)
    if isinstance(fused, Member):
        return max(
            model.absorbed(op, one, _spared_bytes(view, op, one, fused, mesh), fused.is_last, fused.work)
            for one in of_devices
        )
    tensors, specs = (op.outputs, choice.spec.out_specs) if fused.prologue else (op.inputs, choice.spec.in_specs)
    between = next(spec for x, spec in zip(tensors, specs, strict=True) if view.names[x] == fused.tensor)
    shape, itemsize = view.shape(fused.tensor), view.itemsize(fused.tensor)
    return max(
        model.absorbed(op, one, 2 * between.local_nbytes(shape, itemsize, mesh, one.coordinate)) for one in of_devices
    )


def _spared_bytes(view: GraphView, op: Operator, choice: Choice, member: Member, mesh: DeviceMesh) -> int:
    """Count the bytes of the inputs and outputs that a kernel does not move for one of its operators."""
    return sum(
        specs[position].local_nbytes(
            view.shape(name := view.names[tensors[position]]), view.itemsize(name), mesh, choice.coordinate
        )
        for tensors, specs, positions in zip(
            (op.inputs, op.outputs), (choice.spec.in_specs, choice.spec.out_specs), member.spared, strict=True
        )
        for position in positions
    )


def split_seconds(
    between: Between,
    produced: Sequence[tuple[TensorShardSpec, bool]],
    required: Sequence[TensorShardSpec],
    seconds_in: Callable[[TensorShardSpec], float],
) -> npt.NDArray[np.float64]:
    """Predict the seconds of splitting a kernel at a tensor; 0 unless the tensor there is reduced or converted.

    ``produced`` (rows) are specs in which the tensor is produced, and whether it is reduced. The cost is paid once for
    each distinct ``required`` spec (columns). ``seconds_in`` are those of :meth:`CostModel.split` for the tensor in a
    spec.
    """
    sources, targets = [spec for spec, _ in produced], list(required)
    number = {spec: n for n, spec in enumerate(dict.fromkeys((*sources, *targets)))}
    source, target = (np.array([number[spec] for spec in specs]) for specs in (sources, targets))
    seconds = np.array([seconds_in(spec) for spec in number])
    breaks = np.array([between.rows and splits_rows(spec) for spec in number])
    is_reduced = np.array([reduced for _, reduced in produced])
    # An end that is still part of the kernel has neither the launch nor the pass among its costs.
    begins = ~is_reduced & ~breaks[source]
    ends = between.rows & ~breaks[target]
    whole = between.inner & (begins[:, None] | ends)
    of_source = seconds[source][:, None]
    plain = 0.0 if between.prologue is None else of_source if between.prologue else seconds[target]
    is_passed_on = ~is_reduced[:, None] & (source[:, None] == target)
    split: npt.NDArray[np.float64] = np.where(is_passed_on, 0.0, np.where(whole, of_source, plain))
    return split
