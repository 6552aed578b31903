"""The memory of a device while a plan runs: weights, states, graph inputs and outputs all the time, activations while
live.

Every operator has three *program points*: its inputs are converted, it runs, its partial outputs are reduced. At a last
point the graph outputs are converted. Live intervals, before kernels are fused:

* The result of an operator lives from the point at which it is computed to the last operator that reads the tensor in
  any spec. A result in the spec of a graph output is written to the output, and is held during the whole run.
* A converted tensor lives from the first operator that requires its spec to the last one. During the conversion, the
  buffers between its steps, and the copies that pack and unpack shards, are live too. There are none where collectives
  place shards (``places_shards``), unless mesh axes split a dim in descending order or unequally.
* What an operator holds while it runs (``scratch_elements`` of its traits) lives at that point.
* A partial result lives until it is reduced, together with the buffers of its reduce functions.
* A view (an operator whose output shares memory with its input, such as a reshape) takes no memory while the tensor
  that it views is live. After that, the view keeps the memory. The new value of a state is such a view of the state.
* What operators compute from nothing (a causal mask, positions) is computed when the program is built. The results that
  other operators read are constants of the program, and held during the whole run; those between take no memory.

Where parts are unequal, devices hold shards of unlike sizes. The memory is that of the device at a coordinate, or by
default of one whose shards are as large as the largest ones.

Buffers count as they are placed (:mod:`hidet_dist.spec.buffers`). Where fused kernels keep intermediate results in
registers, a program mostly holds less; it may hold more where a kernel's inputs are read for longer than an operator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from hidet_dist.reshard import PlannedSteps
from hidet_dist.reshard.buffers import conversion_nbytes, reduction_nbytes
from hidet_dist.rules.scratch import scratch_nbytes
from hidet_dist.spec import StagePlan, TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.spec.report import Holding
from hidet_dist.view import GraphView

CONVERT, RUN, REDUCE = range(3)
POINTS = 3  # per operator


class Lifetimes:
    """The live intervals of the tensors of a graph, in program points, by name.

    Attributes
    ----------
    count: the number of program points.
    end: the last point at which a tensor is read in any spec; a tensor without readers is not in it.
    viewed: for each view, the name of the tensor that it views; for the result of a state's update, of the state.
    computed: the results of operators that depend on no weight, state or graph input: they are computed beforehand,
        unless there are symbolic dims.
    constants: those of them that other operators read, or that are graph outputs.
    """

    def __init__(self, view: GraphView):
        self.count = POINTS * len(view.operators) + 1
        self.end: dict[str, int] = {}
        self.viewed: dict[str, str] = {}
        for name, use in view.uses():
            self.end[name] = self.count - 1 if use.operator is None else POINTS * use.operator + RUN
        for op in view.operators:
            for o, i in op.task.share_map.items():
                self.viewed[view.names[op.outputs[o]]] = view.names[op.inputs[i]]
        for number, state in view.updates.items():
            result = view.names[view.operators[number].outputs[0]]
            self.viewed[result] = state
            self.end[result] = self.count - 1
        self.end.update(dict.fromkeys(view.states, self.count - 1))
        self.computed: set[str] = set()
        for op in () if view.symbols else view.operators:
            if all(view.names[x] in self.computed for x in op.inputs):
                self.computed.update(view.names[y] for y in op.outputs)
        self.constants = self.computed.intersection(view.outputs)
        for op in view.operators:
            if view.names[op.outputs[0]] not in self.computed:
                self.constants.update(self.computed.intersection(view.names[x] for x in op.inputs))

    def after(self, operator: int, name: str) -> tuple[int, int]:
        """Return the first and last point at which an output is live after its operator; none if last < first."""
        if name in self.computed:
            return (0, self.count - 1) if name in self.constants else (0, -1)
        begin = POINTS * (operator + 1)
        if name in self.viewed:
            begin = max(begin, self.end[self.viewed[name]] + 1)
        return begin, self.end.get(name, -1)

    def required(self, name: str, operator: int | None, aliases: bool) -> tuple[int, int]:
        """Return the first and last point at which a converted tensor is live for one reader."""
        if operator is None:
            return self.count - 1, self.count - 1
        return POINTS * operator + CONVERT, self.end[name] if aliases else POINTS * operator + RUN


STATE, WEIGHT, INPUT, OUTPUT, ACTIVATION, CONVERTED, BUFFER = (
    "state",
    "weight",
    "input",
    "output",
    "activation",
    "converted",
    "buffer",
)


def point_bytes(
    view: GraphView, stage: StagePlan, places_shards: bool = False, coordinate: Sequence[int] | None = None
) -> list[int]:
    """Compute the bytes that a device holds at each program point. Raises SpecError for a spec that does not fit."""
    change = [0] * (POINTS * len(view.operators) + 2)
    for one in holdings(view, stage, places_shards, coordinate):
        change[one.begin] += one.nbytes
        change[one.end + 1] -= one.nbytes
    return list(accumulate(change))[:-1]


def holdings(
    view: GraphView, stage: StagePlan, places_shards: bool = False, coordinate: Sequence[int] | None = None
) -> list[Holding]:
    """List the memory that a device holds, with live intervals. Raises SpecError for a spec that does not fit.

    ``places_shards``: collectives need no copies, as those in host memory. ``coordinate``: that of the device; by
    default, all shards are the largest ones.
    """
    mesh, lifetimes = stage.mesh, Lifetimes(view)
    conversions = PlannedSteps(stage)
    held: list[Holding] = []

    def hold(name: str, what: str, begin: int, end: int, nbytes: int) -> None:
        if begin <= end:
            held.append(Holding(name, what, begin, end, nbytes))

    sizes: dict[tuple[tuple[int, ...], int, TensorShardSpec], int] = {}  # equal layers have equal tensors

    def size(name: str, spec: TensorShardSpec) -> int:
        key = view.shape(name), view.itemsize(name), spec
        if key not in sizes:
            sizes[key] = spec.local_nbytes(*key[:2], mesh, coordinate)
        return sizes[key]

    def buffer(name: str, spec: TensorShardSpec) -> int:
        return buffer_nbytes(size(name, spec))

    resident = {(name, tensor.spec) for name, tensor in zip(view.outputs, stage.outputs, strict=True)}
    spec_of: dict[str, TensorShardSpec] = {}
    kinds = ((WEIGHT, stage.weights), (STATE, stage.states), (INPUT, stage.inputs), (OUTPUT, stage.outputs))
    for what, tensors in kinds:
        for tensor in tensors:
            nbytes = size(tensor.name, tensor.spec) if tensor.storage is None else tensor.local_nbytes(mesh, coordinate)
            hold(tensor.name, what, 0, lifetimes.count - 1, nbytes)
    for tensor in stage.stored:
        spec_of[tensor.name] = tensor.spec
    for number, (op, plan) in enumerate(zip(view.operators, stage.operators, strict=True)):
        at = POINTS * number
        scratch = buffer_nbytes(scratch_nbytes(op, plan.spec, view.shape_of, mesh, coordinate))
        if scratch:
            hold(view.names[op.outputs[0]], BUFFER, at + RUN, at + RUN, scratch)
        for o, (y, spec, fns) in enumerate(zip(op.outputs, plan.spec.out_specs, plan.spec.reduce_fns, strict=True)):
            name = view.names[y]
            spec_of[name] = spec
            kept = 0 if (name, spec) in resident else buffer(name, spec)
            hold(name, ACTIVATION, *lifetimes.after(number, name), kept)
            if name in lifetimes.viewed or (name in lifetimes.computed and not fns):
                continue
            partial, sized = plan.spec.partial_spec(o), (view.shape(name), view.itemsize(name))
            hold(name, ACTIVATION, at + RUN, at + RUN, buffer(name, partial) if fns else kept)
            most = reduction_nbytes(*sized, partial, fns, mesh, places_shards, coordinate)
            hold(name, ACTIVATION, at + REDUCE, at + REDUCE, most if fns else kept)
    spans: dict[tuple[str, TensorShardSpec], tuple[int, int]] = {}
    for name, target, begin, end in _requirements(view, stage, lifetimes):
        if target != spec_of[name]:
            first, last = spans.get((name, target), (begin, end))
            spans[name, target] = min(first, begin), max(last, end)
    for (name, target), (begin, end) in spans.items():
        if (name, target) not in resident:
            hold(name, CONVERTED, begin, end, buffer(name, target))
        steps = conversions.take(name, view.pieces(name)[0], spec_of[name], target)
        sized = view.shape(name), view.itemsize(name)
        working = conversion_nbytes(*sized, spec_of[name], steps, mesh, places_shards, coordinate)
        hold(name, BUFFER, begin, begin, working)
    return held


def _requirements(
    view: GraphView, stage: StagePlan, lifetimes: Lifetimes
) -> Iterator[tuple[str, TensorShardSpec, int, int]]:
    """Yield for each use of a tensor its name, the required spec, and the first and last point of its live interval."""
    for name, use in view.uses():
        if use.operator is None:
            yield name, stage.outputs[use.position].spec, *lifetimes.required(name, None, False)
            continue
        aliases = use.position in view.operators[use.operator].task.share_map.values()
        target = stage.operators[use.operator].spec.in_specs[use.position]
        yield name, target, *lifetimes.required(name, use.operator, aliases)


def live_bytes(
    view: GraphView, stage: StagePlan, places_shards: bool = False, coordinate: Sequence[int] | None = None
) -> list[int]:
    """Compute the peak bytes of a device during each operator, in execution order.

    ``places_shards``: collectives need no copies, as those in host memory. ``coordinate``: that of the device; by
    default, all shards are the largest ones.

    There is one entry per operator, and a last one for the conversion of the graph outputs. Their maximum is the memory
    that the stage needs. Raises SpecError for a spec that does not fit the graph.
    """
    held = point_bytes(view, stage, places_shards, coordinate)
    return [max(held[i : i + POINTS]) for i in range(0, len(held), POINTS)]
