"""Export of modules: ``torch.export``, then decomposition to ATen operators without side effects."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import mmap
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch._export import utils as torch_export_utils
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hidet_dist.compat.replacing import replaced
from hidet_dist.errors import TraceError
from hidet_dist.frontends.pytorch.calls import supported
from hidet_dist.frontends.pytorch.experts import experts_by_products
from hidet_dist.frontends.pytorch.known_values import KnownValues
from hidet_dist.frontends.pytorch.layers import LAYER, Findings, Layer, Layers
from hidet_dist.frontends.pytorch.own_experts import own_experts_by_products
from hidet_dist.frontends.pytorch.reasons import reason_of
from hidet_dist.frontends.pytorch.size_conditions import narrowed_sizes

_ALLOCATED = 2**30  # bytes that PyTorch may allocate for a moment
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux (mmap(2)), which Python 3.11's mmap does not name


@dataclass(frozen=True)
class Exported:
    """A program, and the layers whose calls are operators in it, by the number in these operators.

    ``sizes`` are the least and greatest sizes of PyTorch's symbols, by name, where the module's code narrows them.
    """

    program: ExportedProgram
    layers: Mapping[int, Layer] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def exported(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    lines: bool = False,
) -> Exported:
    """Export a module as a functional graph of ATen operators, as far as possible of those that have a lowering.

    Parameters and inputs on the meta device take no memory. The module is not changed. Layers that it has several times
    are exported once, unless shapes are symbolic or lines are recorded.

    Parameters
    ----------
    module: torch.nn.Module
        The module, in evaluation mode.
    args, kwargs: sequence, mapping
        The arguments of one call.
    dynamic_shapes:
        The symbolic dims, as ``torch.export.export`` takes them.
    lines: bool
        Whether to record the line of code that calls each operator, which takes time.

    Raises
    ------
    TraceError
        When the module is quantized, is in training mode, keeps a state in an attribute, or cannot be exported. The
        message has PyTorch's reason.
    """
    _refuse_quantized(module)
    if any(part.training for part in module.modules()):
        raise TraceError(
            f"{type(module).__name__} is in training mode, in which dropout and batch norms compute something else: "
            "call module.eval() first."
        )
    with (
        torch.no_grad(),
        _without_memory(module),
        _without_caches(module),
        _stack_traces(lines),
        # The graphs between PyTorch's passes are not run, so generating their code would be a waste.
        _use_lazy_graph_module(True),
        _assigned_attributes() as assigned,
        experts_by_products(),
        own_experts_by_products(),
        KnownValues(),
        quiet_logs(),
    ):
        # PyTorch warns of its own calls, and of its recurrent layers.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights")
        given = pytree.tree_map_only(torch.Tensor, _Placeholders(), (tuple(args), dict(kwargs)))
        found = None if dynamic_shapes is not None or lines else _with_repeated_layers(module, given, assigned)
        try:
            if found is None:
                found = _with_symbols(module, given[0], given[1], dynamic_shapes)
        except Exception as error:
            name = type(module).__name__
            raise TraceError(f"{name} cannot be exported by torch.export: {reason_of(error)}") from error
    if states := sorted(assigned & set(found.program.constants)):
        raise TraceError(
            f"{type(module).__name__} reads its attribute {states[0]!r} and assigns another tensor to it in a call, "
            "and a graph keeps no state between calls: make it an argument and a result."
        )
    return found


def _exported(module: torch.nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
    return functional(torch.export.export(module, args, kwargs, strict=False))


def _with_symbols(module: torch.nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> Exported:
    """Export a module for all sizes of symbolic dims, or for those that its code takes alike.

    PyTorch refuses conditions on sizes that it cannot prove. In a second attempt it asserts them instead.
    """
    export = functools.partial(torch.export.export, module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)

    def attempt(**options: Any) -> Exported:
        program = export(**options)
        sizes = narrowed_sizes(program)
        return Exported(functional(program), sizes=sizes)

    try:
        return attempt()
    except Exception as error:
        if dynamic_shapes is None:
            raise
        try:
            return attempt(prefer_deferred_runtime_asserts_over_guards=True)
        except Exception:  # of PyTorch or of the module: the first one has the reason
            raise error from None


def _with_repeated_layers(module: torch.nn.Module, given: Any, assigned: set[str]) -> Exported | None:
    """Export a module with calls of the layers that it repeats; None if it repeats none, or they cannot be."""
    findings = Findings()
    while True:
        layers = Layers(module, findings)
        if not layers.groups:
            return None
        try:
            with layers.replaced():
                program = _exported(module, *given)
            if not layers.must_be_tried_again:
                parts = layers.programs(_exported_layer)
            if not layers.must_be_tried_again:
                return None if assigned and parts else Exported(program, parts)
        except Exception:  # of PyTorch or of the module; if it is not for the layers, it comes again without them
            if not layers.must_be_tried_again:
                return None


def _exported_layer(layer: torch.nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
    """Export a layer for arguments on the meta device."""
    return _exported(layer, *pytree.tree_map_only(torch.Tensor, _empty, (args, kwargs)))


def _refuse_quantized(module: torch.nn.Module) -> None:
    """Raise TraceError for modules whose weights are packed integers, and for parameters that hide such tensors."""
    advice = "quantized modules are not supported: convert the module that it was made from."
    for name, part in module.named_modules():
        if ".quantized." in f"{type(part).__module__}.":
            raise TraceError(f"{name or 'The module'} is a {type(part).__module__}.{type(part).__qualname__}; {advice}")
    parameters: dict[str, Any] = dict(module.named_parameters())
    for name, x in parameters.items():
        if is_traceable_wrapper_subclass(x):
            raise TraceError(f"The parameter {name!r} is a {type(x).__module__}.{type(x).__qualname__}; {advice}")


def functional(program: ExportedProgram) -> ExportedProgram:
    """Decompose operators that write to their inputs or have no lowering, as far as PyTorch can."""
    if _is_functional(program):
        return program
    with _listed_once():
        return program.run_decompositions(_decompositions())


class ExportedModule(torch.nn.Module):
    """A module with the parameters, buffers and constants of an exported program; tied ones are one tensor."""

    def __init__(self, program: ExportedProgram):
        super().__init__()
        known: dict[Any, torch.Tensor] = {}
        for name, x in {**program.constants, **program.state_dict}.items():
            if not isinstance(x, torch.Tensor):
                continue
            owner, _, attribute = name.rpartition(".")
            # A loaded program has a tensor for each name; those of tied weights share their storage.
            storage = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype)
            shared = known.setdefault(storage if storage[0] else id(x), x)
            part: torch.nn.Module = self
            for step in filter(None, owner.split(".")):
                if step not in part._modules:
                    part.add_module(step, torch.nn.Module())
                part = part.get_submodule(step)
            object.__setattr__(part, attribute, shared)


@contextlib.contextmanager
def _stack_traces(enabled: bool) -> Iterator[None]:
    """Have PyTorch record the stack trace of each operator, or not; one that cannot leave them out records them."""
    if not hasattr(torch.fx.config, "do_not_emit_stack_traces"):  # PyTorch 2.11
        yield
        return
    before = torch.fx.config.do_not_emit_stack_traces
    torch.fx.config.do_not_emit_stack_traces = not enabled
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


@contextlib.contextmanager
def _assigned_attributes() -> Iterator[set[str]]:
    """Collect the paths of the attributes to which a module assigns tensors while it is exported.

    PyTorch only warns of them, and drops the tensors.
    """
    assigned: set[str] = set()

    def note(message: Warning | str, *where: Any, **options: Any) -> None:
        if str(message).startswith("The tensor attribute"):
            assigned.update(re.findall(r"self\.([\w.]+)", str(message)))
        else:
            show(message, *where, **options)

    with warnings.catch_warnings():
        show, warnings.showwarning = warnings.showwarning, note
        warnings.filterwarnings("always", "The tensor attribute")
        yield assigned


@contextlib.contextmanager
def _without_caches(module: torch.nn.Module) -> Iterator[None]:
    """Let modules of transformers return no caches, which are no results of a graph, unless a call asks for them.

    The configuration of each part of a model decides for it.
    """
    configurations = {id(one): one for part in module.modules() if (one := getattr(part, "config", None)) is not None}
    caching = [one for one in configurations.values() if getattr(one, "use_cache", None) is True]
    for one in caching:
        one.use_cache = False
    try:
        yield
    finally:
        for one in caching:
            one.use_cache = True


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep PyTorch from logging the failures of an export, unless its level is set: the error has the reason.

    Nor does it print the graph that it has made until then.
    """
    loggers = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        if logger.getEffectiveLevel() >= logging.WARNING:
            logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(_WithoutGraphs(sys.stderr)):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _WithoutGraphs:
    """A stream that passes on all but the code of graphs, which ``torch.export`` prints when it fails."""

    def __init__(self, stream: Any):
        self._stream, self._has_dropped = stream, False

    def write(self, text: str) -> int:
        is_graph = text.lstrip().startswith("def forward(")
        is_end_of_one = self._has_dropped and text == "\n"
        self._has_dropped = is_graph
        return len(text) if is_graph or is_end_of_one else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def argument_names(module: torch.nn.Module, count: int) -> list[str]:
    """List the names of the first ``count`` positional arguments of a module's ``forward``."""
    names = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{number}" for number in range(count - len(names))]
    return names[:count]


def _is_functional(program: ExportedProgram) -> bool:
    """Whether all operators of a program have a lowering and write to none of their inputs."""
    known = set(supported())
    for graph_module in program.graph_module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if target is LAYER:
                continue
            if target._schema.is_mutable or (str(target) not in known and not _is_ignored(target)):
                return False
    return True


def _is_ignored(target: torch._ops.OpOverload) -> bool:
    """Whether an operator is an assertion or arithmetic on sizes, which need no lowering."""
    name = str(target)
    return "assert" in name or name.startswith(("aten.sym_", "prims.")) or "sym_constrain" in name


@contextlib.contextmanager
def _listed_once() -> Iterator[None]:
    """Have PyTorch register its composite operators once meanwhile, instead of twice for each of 28 namespaces.

    That is a tenth of the time that an export takes.
    """
    name = "_materialize_cpp_cia_ops"
    register = getattr(torch_export_utils, name, None)
    with replaced(torch_export_utils, {} if register is None else {name: lru_cache(None)(register)}):
        yield


def _decompositions() -> Any:
    """Return PyTorch's table of decompositions without the operators that have a lowering."""
    table = torch.export.default_decompositions()
    known = set(supported())
    for operator in list(table):
        if str(operator) in known:
            table.pop(operator, None)
    return table


class _Placeholders:
    """Replaces tensors on the meta device by tensors on the CPU, and tensors that were there before by copies.

    PyTorch takes one tensor that is given for two arguments for one argument.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_repeated = id(x) in self.seen
        self.seen.add(id(x))
        return _empty(x) if x.device.type == "meta" or is_repeated else x


def _empty(x: torch.Tensor, what: str = "A tensor") -> torch.Tensor:
    """Make a tensor on the CPU with the shape, strides and dtype of ``x`` and without memory. Errors say what it is."""
    nbytes = x.untyped_storage().nbytes()
    if nbytes > _ALLOCATED:
        # Addresses alone: no memory is reserved for them, and none is used as long as nothing is written.
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise TraceError(
                f"{what} of the shape {list(x.shape)} has {nbytes} bytes, for which this process gets no addresses "
                f"({error}): make the model smaller, or raise the limit of the process's memory (ulimit -v)."
            ) from error
        return torch.frombuffer(pages, dtype=torch.uint8).view(x.dtype).as_strided(x.shape, x.stride())
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


@contextlib.contextmanager
def _without_memory(module: torch.nn.Module) -> Iterator[None]:
    """Replace a module's parameters and buffers on the meta device by tensors on the CPU without memory, for a while.

    PyTorch refuses operators on tensors of two devices, and inputs, masks and positions are on the CPU.
    """
    changed: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    stand_ins: dict[int, torch.Tensor] = {}
    for place, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in list(tensors.items()):
                if x is None or x.device.type != "meta":
                    continue
                if id(x) not in stand_ins:
                    is_parameter = isinstance(x, torch.nn.Parameter)
                    empty = _empty(x, f"The weight {'.'.join(filter(None, (place, name)))!r}")
                    stand_ins[id(x)] = torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty
                changed.append((part, name, x))
                setattr(part, name, stand_ins[id(x)])  # recurrent layers update their list of weights then
    try:
        yield
    finally:
        for part, name, x in changed:
            setattr(part, name, x)
