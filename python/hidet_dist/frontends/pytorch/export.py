"""Modules exported: ``torch.export``, then ATen operators without side effects."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from hidet_dist.errors import TraceError
from hidet_dist.frontends.pytorch.calls import supported


def exported(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    lines: bool = False,
) -> ExportedProgram:
    """A module as a functional graph of ATen operators, each of them lowered here where that is possible.

    Parameters and inputs on the meta device take no memory. The module stays as it is. With ``lines`` each operator
    knows the line of code that calls it, which takes time.

    Raises
    ------
    TraceError
        When the module cannot be exported; it says what PyTorch said.
    """
    if any(part.training for part in module.modules()):
        raise TraceError(
            f"{type(module).__name__} is in training mode, in which dropout and batch norms do something else: call "
            "module.eval() first."
        )
    with (
        torch.no_grad(),
        _without_memory(module),
        _lines_known(lines),
        # The graphs between PyTorch's passes are not run, so that there is no need to generate code of each.
        _use_lazy_graph_module(True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own calls
        warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights")  # of PyTorch's own recurrent layers
        given = pytree.tree_map_only(torch.Tensor, _placeholder, (tuple(args), dict(kwargs)))
        try:
            program = functional(torch.export.export(module, *given, dynamic_shapes=dynamic_shapes, strict=False))
        except Exception as error:
            raise TraceError(
                f"{type(module).__name__} cannot be exported by torch.export: {_first_lines(error)}\n"
                "What depends on the values of tensors (such as `if x.sum() > 0`, `x.item()` or `x.tolist()`) must go: "
                "compute it before, or with torch.where."
            ) from error
    return program


def functional(program: ExportedProgram) -> ExportedProgram:
    """An exported program without operators that write to their inputs, as far as possible of those lowered here."""
    return program if _is_functional(program) else program.run_decompositions(_decompositions())


class ExportedModule(torch.nn.Module):
    """The parameters, buffers and constants of an exported program, under their names; tied ones are one tensor."""

    def __init__(self, program: ExportedProgram):
        super().__init__()
        known: dict[Any, torch.Tensor] = {}
        for name, x in {**program.constants, **program.state_dict}.items():
            if not isinstance(x, torch.Tensor):
                continue
            owner, _, own = name.rpartition(".")
            # A file has each weight as a tensor of its own; tied ones share their storage.
            key = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype)
            known_x = known.setdefault(key if key[0] else id(x), x)
            part: torch.nn.Module = self
            for step in filter(None, owner.split(".")):
                if step not in part._modules:
                    part.add_module(step, torch.nn.Module())
                part = part.get_submodule(step)
            object.__setattr__(part, own, known_x)


@contextlib.contextmanager
def _lines_known(lines: bool) -> Iterator[None]:
    """Have PyTorch note the line that calls each operator, or not."""
    before = torch.fx.config.do_not_emit_stack_traces
    torch.fx.config.do_not_emit_stack_traces = not lines
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def argument_names(module: torch.nn.Module, count: int) -> list[str]:
    """The names of the first arguments of a module's ``forward``."""
    names = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{number}" for number in range(count - len(names))]
    return names[:count]


def _first_lines(error: Exception, count: int = 12) -> str:
    lines = str(error).strip().splitlines()
    return "\n".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:count]])


def _is_functional(program: ExportedProgram) -> bool:
    """Whether a program has only operators that are lowered here, and that write to none of their inputs."""
    known = set(supported())
    for graph_module in program.graph_module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if target._schema.is_mutable or (str(target) not in known and not _is_ignored(target)):
                return False
    return True


def _is_ignored(target: torch._ops.OpOverload) -> bool:
    name = str(target)
    return "assert" in name or name.startswith(("aten.sym_", "prims.")) or "sym_constrain" in name


def _decompositions() -> Any:
    table = torch.export.default_decompositions()
    known = set(supported())
    for operator in list(table):
        if str(operator) in known:
            table.pop(operator, None)
    return table


def _placeholder(x: torch.Tensor) -> torch.Tensor:
    return _empty(x) if x.device.type == "meta" else x


def _empty(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU with the shape and dtype of ``x``, and no memory behind it."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


@contextlib.contextmanager
def _without_memory(module: torch.nn.Module) -> Iterator[None]:
    """Have tensors on the CPU, without memory, in the place of a module's parameters and buffers on the meta device.

    Tensors of two devices in one operator are refused by PyTorch, and inputs, masks and positions are on the CPU.
    """
    changed: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, x in list(own.items()):
                if x is None or x.device.type != "meta":
                    continue
                if id(x) not in made:
                    stand_in = _empty(x)
                    made[id(x)] = (
                        torch.nn.Parameter(stand_in, requires_grad=False)
                        if isinstance(x, torch.nn.Parameter)
                        else stand_in
                    )
                changed.append((part, name, x))
                setattr(part, name, made[id(x)])  # recurrent layers keep a list of their weights besides
    try:
        yield
    finally:
        for part, name, x in changed:
            setattr(part, name, x)
