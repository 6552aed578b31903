"""Hooks that bring what hidet's tests compute to the ranks.

hidet computes in four ways, each of which is replaced while a test runs:

* operators on tensors with data, at once: they are put off until a value is asked for, and then computed as one graph;
* graphs that are called (``FlowGraph.__call__``) or built (``FlowGraph.build``);
* PyTorch's modules, through ``torch.compile(backend="hidet")``: they are traced by ``from_torch``;
* ONNX files, through ``hidet.graph.frontend.from_onnx``: they are read by this project's ``from_onnx``.

The device ``cuda`` is the CPU. ``hidet.graph.optimize`` gives the graph as it is, for ``auto_parallel`` takes graphs as
they are traced; only the weights are quantized where a test asks for that.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import hidet
import torch
from hidet.graph import FlowGraph, Operator, PassContext, Tensor
from hidet.graph.transforms.selective_quantize import selective_quantize_pass
from hidet.ir.expr import SymbolVar
from hidet.ir.tools import collect
from hidet.runtime.device import Device, instantiate_device
from hidet.runtime.storage import Storage
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree

import hidet_dist
from hidet_dist.errors import TraceError
from hidet_dist.frontends.onnx.model import from_onnx
from hidet_dist.spec.interface import interface_of

Compute = Callable[[FlowGraph, Sequence[torch.Tensor]], list[torch.Tensor]]

_forward = FlowGraph.forward
_run = Operator.run
_optimize, _from_onnx = hidet.graph.optimize, hidet.graph.frontend.from_onnx
_DEFERRED = "_deferred"
_ARCHITECTURE = (8, 0)  # of the GPU that there seems to be: major and minor compute capability


@dataclass
class Session:
    """What one test computes: the graphs that the ranks computed, those that were built and not run, and errors."""

    compute: Compute
    runs: list[Run] = field(default_factory=list)
    built: list[FlowGraph] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    inside: bool = False

    def run(self, graph: FlowGraph, inputs: Sequence[torch.Tensor], is_hidets: bool = True) -> list[torch.Tensor]:
        """The outputs of a graph, computed by the ranks. Errors are noted, and raised again."""
        with self.own_work():
            inputs = [x.detach().cpu().contiguous() for x in inputs]
            own = Run(graph, inputs, is_hidets)
            self.runs.append(own)
            found = self.compute(graph, inputs)
            own.outputs = [y.to(_dtype(z)) for y, z in zip(found, graph.outputs, strict=True)]
            return own.outputs

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """Let hidet and PyTorch be as they are while the block runs, and note its errors."""
        if self.inside:
            yield
            return
        self.inside = True
        try:
            # Within a function of PyTorch that is being replaced the mode is off already.
            with _pop_mode_temporarily() if _len_torch_function_stack() else contextlib.nullcontext():
                yield
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            self.inside = False


@dataclass(eq=False)
class Run:
    """A graph that the ranks computed, or failed to.

    Attributes
    ----------
    is_hidets: whether hidet made it, and not a front end.
    function: the function of PyTorch that was traced, if it has no parameters: of tensors, to one tensor.
    """

    graph: FlowGraph
    inputs: list[torch.Tensor]
    is_hidets: bool
    outputs: list[torch.Tensor] | None = None
    function: Callable[..., Any] | None = None

    def whole(self) -> list[torch.Tensor]:
        """The outputs as hidet itself computes them, operator by operator on the CPU."""
        return [y.torch() for y in _forward(self.graph, [hidet.from_torch(x) for x in self.inputs])]


def _dtype(x: Tensor) -> torch.dtype:
    return getattr(torch, x.dtype.name)


@contextlib.contextmanager
def hooked(session: Session) -> Iterator[None]:
    """Let the ranks compute while the block runs."""
    from hidet.graph.frontend.torch import dynamo_backends  # can be imported once PyTorch seems to have NCCL

    patches = [
        mock.patch.object(Operator, "run", _deferring(session)),
        mock.patch.object(Tensor, "storage", property(_storage(session))),
        mock.patch.object(FlowGraph, "forward", _forwarding(session)),
        mock.patch.object(FlowGraph, "build", lambda graph, **_: Built(session, graph)),
        mock.patch.object(torch, "compile", _compiling(session)),
        mock.patch.object(hidet.drivers, "build_task", hidet.drivers.build_task),  # tests that fail leave it replaced
        mock.patch.object(hidet.option.cuda, "get_arch_pair", lambda: _ARCHITECTURE),
        *_everywhere(_optimize, _quantizing(session)),
        *_everywhere(_from_onnx, lambda path: OnnxModel(session, path)),
        *_everywhere(instantiate_device, _cpu_for_cuda(session)),
        mock.patch.object(Tensor, "cuda", lambda x, *_: x),
        mock.patch.object(Storage, "copy", _copied),  # which hidet has for GPUs alone
        mock.patch.object(hidet, "load_compiled_graph", Built.load),
        mock.patch.object(dynamo_backends, "flow_graph_cache_load", lambda *_: (None, None)),
        mock.patch.object(dynamo_backends, "flow_graph_cache_save", lambda *_: None),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(CudaIsCpu())
        stack.enter_context(hidet.option.context())  # what a test sets holds for that test
        yield


def _copied(storage: Storage) -> Storage:
    made = Storage.new("cpu", storage.num_bytes)
    ctypes.memmove(made.addr, storage.addr, storage.num_bytes)
    return made


def _everywhere(function: Any, other: Any) -> list[Any]:
    """Patches of all modules of hidet that know a function."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hidet":
            for own, value in list(vars(module).items()):
                if value is function:
                    found.append(mock.patch.object(module, own, other))
    return found


# Operators on tensors with data


def _is_deferred(x: Tensor) -> bool:
    return x._storage is None and getattr(x, _DEFERRED, False)


def _deferring(session: Session) -> Callable[[Operator], list[Tensor]]:
    def run(op: Operator) -> list[Tensor]:
        symbolic = (
            any(x._storage is None and not _is_deferred(x) for x in op.inputs)
            or hidet.option.get_execution_mode() == "symbolic"
            or bool(collect(op.task, SymbolVar))
        )
        if session.inside or symbolic:
            for x in op.inputs:
                if not session.inside and _is_deferred(x):
                    _force(session, x)
            return _run(op)
        outputs: list[Tensor] = op.symbolic_run()
        for y in outputs:
            setattr(y, _DEFERRED, True)
        return outputs

    return run


def _storage(session: Session) -> Callable[[Tensor], Any]:
    def storage(x: Tensor) -> Any:
        if not session.inside and _is_deferred(x):
            _force(session, x)
        return x._storage

    return storage


def _force(session: Session, y: Tensor) -> None:
    """Have a tensor that was put off computed. The first tensor with data is an input; all others are weights."""
    operators: dict[int, Operator] = {}
    leaves: dict[int, Tensor] = {}

    def visit(x: Tensor) -> None:
        if not _is_deferred(x):
            leaves.setdefault(id(x), x)
            return
        op = x._trace[0]
        if id(op) not in operators:
            for own in op.inputs:
                visit(own)
            operators[id(op)] = op

    if 0 in y.shape:
        y._storage, y._trace = Storage.new("cpu", 0), None
        return
    visit(y)
    made: dict[int, Tensor] = {}
    given = next((x for x in leaves.values() if x.dtype.is_float()), next(iter(leaves.values()), None))
    if given is not None:
        made[id(given)] = hidet.symbol_like(given, device="cpu")
    with session.own_work():
        for op in operators.values():
            own_op = copy.copy(op)
            own_op.inputs = [made.get(id(x), x) for x in op.inputs]
            own_op.outputs = [
                Tensor(z.shape, z.dtype, "cpu", None, trace=(own_op, number)) for number, z in enumerate(op.outputs)
            ]
            made.update({id(old): new for old, new in zip(op.outputs, own_op.outputs, strict=True)})
        graph = FlowGraph([made[id(y)]], [] if given is None else [made[id(given)]])
        (found,) = session.run(graph, [] if given is None else [given.torch()])
        own = hidet.from_torch(found)
    y._storage, y._trace = own._storage, None
    y.kept = own  # what owns the memory


# Graphs


def _forwarding(session: Session) -> Callable[[FlowGraph, Sequence[Tensor]], list[Tensor]]:
    def forward(graph: FlowGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
        if session.inside:
            return _forward(graph, inputs)
        return [hidet.from_torch(y) for y in session.run(graph, [x.torch() for x in inputs])]

    return forward


class Built:
    """What takes the place of a compiled graph: each call is computed by the ranks."""

    saved: ClassVar[dict[str, Built]] = {}

    def __init__(self, session: Session, graph: FlowGraph):
        self.session, self.graph = session, graph
        session.built.append(graph)

    def __call__(self, *inputs: Tensor) -> Any:
        outputs = self.graph.forward(list(inputs))
        return outputs[0] if len(outputs) == 1 else outputs

    def run_async(self, inputs: Sequence[Any] = (), output_to_torch_tensor: bool = False) -> list[Any]:
        """The outputs of hidet's or PyTorch's tensors."""
        given = [hidet.from_torch(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        outputs = self.graph.forward(given)
        return [y.torch() for y in outputs] if output_to_torch_tensor else outputs

    def save(self, path: str, **_: Any) -> None:
        """Note the graph under the path."""
        Built.saved[path] = self

    @staticmethod
    def load(path: str) -> Built:
        """The graph that was saved under the path."""
        return Built.saved[path]

    def clear_dispatch_table(self) -> None:
        """There is none."""


def _quantizing(session: Session) -> Callable[[FlowGraph], FlowGraph]:
    """What takes the place of hidet's optimization: of its passes, the one that changes what is computed."""

    def optimize(graph: FlowGraph) -> FlowGraph:
        if not PassContext.current().configs["quantize_patterns"]:
            return graph
        with session.own_work(), hidet.option.context():
            hidet.option.execution_mode("interpreter")
            return selective_quantize_pass()(graph).update_nodes()

    return optimize


# Modules of PyTorch


class Called(torch.nn.Module):
    """A function as a module that takes only tensors; what else it was called with is part of it."""

    def __init__(self, function: Callable[..., Any], spec: Any, others: Mapping[int, Any]):
        super().__init__()
        self.function, self.spec, self.others = function, spec, others
        if inspect.isfunction(function):
            for name, value in inspect.getclosurevars(function).nonlocals.items():
                if isinstance(value, torch.nn.Module):
                    self.add_module(name, value)
        self.eval()

    def forward(self, *tensors: torch.Tensor) -> Any:
        """What the function gives for the tensors."""
        given = iter(tensors)
        count = len(tensors) + len(self.others)
        leaves = [self.others[n] if n in self.others else next(given) for n in range(count)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Compiled:
    """A function of PyTorch that is traced by ``from_torch`` at its first call.

    A dim that the caller marked as dynamic is symbolic, and so is one whose size changes between calls, as far as the
    function can be traced so. It is traced again for anything else that changes.
    """

    def __init__(self, session: Session, function: Callable[..., Any]):
        self.session, self.function = session, function
        self.marked: dict[tuple[int, int], None] = {}  # inputs and their dims that are symbolic
        self.traced: list[tuple[Any, list[torch.Size], FlowGraph]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        others = {n: x for n, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
        key = (str(spec), str(others), [(x.dtype, x.dim()) for x in tensors])
        called = Called(self.function, spec, others)
        with self.session.own_work():
            graph = self._known(key, tensors)
            if graph is None:
                graph = self._trace(called, key, tensors)
                self.traced.append((key, [x.shape for x in tensors], graph))
            found = self.session.run(graph, tensors, is_hidets=False)
            if not list(called.parameters()):
                self.session.runs[-1].function = called
            interface = interface_of(graph)
            assert interface is not None
            return interface.nest(found)

    def _known(self, key: Any, tensors: Sequence[torch.Tensor]) -> FlowGraph | None:
        """The graph that was traced for such inputs."""
        sizes = [size for x in tensors for size in x.shape]
        for graph in (graph for known, _, graph in self.traced if known == key):
            traced = [size for x in graph.inputs for size in x.shape]
            if all(isinstance(x, SymbolVar) or int(x) == y for x, y in zip(traced, sizes, strict=True)):
                return graph
        return None

    def _trace(self, module: Called, key: Any, tensors: Sequence[torch.Tensor]) -> FlowGraph:
        marked = [(n, dim) for n, x in enumerate(tensors) for dim in getattr(x, "_dynamo_dynamic_indices", ())]
        self.marked |= dict.fromkeys(marked)
        changed = {
            (n, dim): None
            for known, shapes, _ in self.traced
            if known == key
            for n, (x, shape) in enumerate(zip(tensors, shapes, strict=True))
            for dim in range(x.dim())
            if x.shape[dim] != shape[dim] and 1 not in (x.shape[dim], shape[dim])
        }
        if changed:
            with contextlib.suppress(TraceError):
                return self._with_symbols(module, tensors, {**self.marked, **changed})
        return self._with_symbols(module, tensors, self.marked)

    def _with_symbols(
        self, module: Called, tensors: Sequence[torch.Tensor], symbols: Mapping[tuple[int, int], None]
    ) -> FlowGraph:
        if not symbols:
            return hidet_dist.from_torch(module, tuple(tensors))
        dims = [
            {dim: torch.export.Dim(f"size{n}_{dim}") for n, dim in symbols if n == own} for own in range(len(tensors))
        ]
        return hidet_dist.from_torch(module, tuple(tensors), {"tensors": tuple(dims)})


def _compiling(session: Session) -> Callable[..., Any]:
    original = torch.compile

    def compile_(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
        return Compiled(session, model) if backend == "hidet" else original(model, backend=backend, **options)

    return compile_


# ONNX


class OnnxModel:
    """An ONNX file as hidet's module of it: called with tensors, it gives tensors."""

    def __init__(self, session: Session, path: str):
        self.session = session
        with session.own_work():
            self.graph = from_onnx(path)

    def to(self, *_: Any, **__: Any) -> OnnxModel:
        """It is where it is."""
        return self

    def __call__(self, *inputs: Tensor) -> Any:
        made = dict(zip(self.graph.inputs, inputs, strict=True))
        for op in self.graph.nodes:
            made.update(zip(op.outputs, op.reforward([made.get(x, x) for x in op.inputs]), strict=True))
        outputs = [made[y] for y in self.graph.outputs]
        return outputs[0] if len(outputs) == 1 else outputs


# Devices


def _cpu_for_cuda(session: Session) -> Callable[[Any], Device]:
    def instantiate(device: Any) -> Device:
        kind = device if isinstance(device, str) else device.kind
        is_cuda = isinstance(kind, str) and kind.partition(":")[0] in ("cuda", "vcuda")
        return instantiate_device("cpu" if is_cuda and not session.inside else device)

    return instantiate


class CudaIsCpu(TorchFunctionMode):
    """PyTorch's functions called with the device ``cuda`` get the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = pytree.tree_map(_on_cpu, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
