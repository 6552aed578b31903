"""hidet 0.6.1 has one launch for each kernel; here kernels that depend on none of the others are one launch.

A small product has fewer tiles than a GPU has multiprocessors, and the others are idle until it ends. Where products
are launched together, each block of the grid finds out by its number whose tile it computes. The bodies of the kernels
are what they were, so the results have the same bits, and no operand has to lie elsewhere.

The kernels are lowered by hidet's passes one by one; then each is a function of the device, which takes the number of
its block as a parameter, and the new kernel calls one of them. Kernels that differ in more than their code, such as
the threads of a block, keep launches of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hidet.transforms
from hidet.ir.dtypes import int32
from hidet.ir.expr import Constant, Expr, Var, call, if_then_else, is_constant
from hidet.ir.func import Function
from hidet.ir.functors import IRRewriter
from hidet.ir.module import IRModule
from hidet.ir.primitives.cuda.vars import blockIdx
from hidet.ir.stmt import BlackBoxStmt, EvaluateStmt, IfStmt, LaunchKernelStmt, LetStmt, SeqStmt, Stmt
from hidet.ir.tools import collect, rename_funcs, rewrite, simplify
from hidet.ir.type import FuncType, VoidType
from hidet.transforms.base import Pass
from hidet.transforms.generate_launch_func import generate_launch_func

from hidet_dist.compat.replacing import replaced

_MARK = "hidet_dist.together"  # an attribute of a launch function
_BLOCK_X = blockIdx.x
_BLOCK = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
_MOST_BLOCKS = 2**31 - 1  # of the first dim of a grid (CUDA C++ Programming Guide, "Compute Capabilities")
_SETS_MEMORY = "cudaFuncSetAttribute("


def launched_in_turn(modules: Sequence[IRModule], calls: Sequence[tuple[int, Sequence[int]]]) -> IRModule:
    """Make a module of the kernels of several, whose launch function calls theirs, one after the other.

    :func:`joint_launches` makes one launch of them, where that is possible.

    Parameters
    ----------
    modules: sequence of IRModule
        The modules, not yet lowered.
    calls: sequence of pairs
        For each call the number of the module, and for each parameter of that module's launch function the number of
        the parameter of the new one.
    """
    result = IRModule()
    launches = []
    for number, module in enumerate(modules):
        own = generate_launch_func(module)
        own = rename_funcs(own, {name: f"part{number}_{name}" for name in own.functions})
        launches.append(own.functions.pop(f"part{number}_launch"))
        result.functions.update(own.functions)
        result.extern_functions.update(own.extern_functions)
        for name in ("include_headers", "include_dirs", "linking_dirs", "linking_libs", "object_files"):
            known = getattr(result, name)
            known += [one for one in getattr(own, name) if one not in known]
    parameters: dict[int, Var] = {}
    bodies = []
    for which, places in calls:
        launch = launches[which]
        for parameter, place in zip(launch.params, places, strict=True):
            parameters.setdefault(place, Var(parameter.hint or parameter.name, parameter.type))
        given = {parameter: parameters[place] for parameter, place in zip(launch.params, places, strict=True)}
        bodies.append(rewrite(launch.body, given, clone_internal_var=True))
    params = [parameters[place] for place in sorted(parameters)]
    attributes = {"func_kind": "public", _MARK: True}
    result.functions["launch"] = Function("launch", params, SeqStmt(bodies), VoidType(), "public", attributes)
    return result


@contextmanager
def joint_launches() -> Iterator[None]:
    """Make one launch of those of :func:`launched_in_turn` while the block runs, where kernels are alike enough."""
    check = hidet.transforms.check_launch_configuration_pass
    with replaced(hidet.transforms, {"check_launch_configuration_pass": lambda: _Together(check())}):
        yield


class _Together(Pass):
    """The pass that joins launches, before one that looks at them."""

    def __init__(self, then: Pass):
        super().__init__()
        self.then = then

    def process_module(self, ir_module: IRModule) -> IRModule:
        for name, function in list(ir_module.functions.items()):
            if function.kind == "public" and function.attrs.get(_MARK):
                ir_module = _joined(ir_module, name)
        return self.then(ir_module)


@dataclass
class _Launches:
    """What a launch function does: the variables that it binds, and its launches."""

    bound: list[tuple[Var, Expr]] = field(default_factory=list)
    launches: list[LaunchKernelStmt] = field(default_factory=list)

    def read(self, body: Stmt) -> bool:
        """Read a statement; tell whether it does nothing else."""
        if isinstance(body, SeqStmt):
            return all(self.read(one) for one in body.seq)
        if isinstance(body, LetStmt):
            self.bound += zip(body.bind_vars, body.bind_values, strict=True)
            return self.read(body.body)
        if isinstance(body, LaunchKernelStmt):
            self.launches.append(body)
            return True
        if isinstance(body, IfStmt):  # of more shared memory, which the joint launch sets itself
            return body.else_body is None and _sets_memory(body.then_body)
        return _sets_memory(body)


def _sets_memory(stmt: Stmt) -> bool:
    if isinstance(stmt, SeqStmt):
        return all(map(_sets_memory, stmt.seq))
    return isinstance(stmt, BlackBoxStmt) and stmt.template_string.startswith(_SETS_MEMORY)


def _alike(module: IRModule, launches: Sequence[LaunchKernelStmt]) -> bool:
    """Whether one kernel can do the work of several launches: with equal blocks, and grids that bodies do not ask."""
    kernels = [module.functions.get(launch.func_var.name) for launch in launches]
    if len(launches) < 2 or any(kernel is None or kernel.kind != "cuda_kernel" for kernel in kernels):
        return False
    if not all(is_constant(*launch.block_dim, *launch.cluster_dim, launch.shared_mem_bytes) for launch in launches):
        return False
    if len({tuple(map(int, launch.block_dim)) for launch in launches}) > 1:
        return False
    if any(int(extent) > 1 for launch in launches for extent in launch.cluster_dim):
        return False
    return not any(
        isinstance(variable.name, str) and variable.name.startswith("gridDim")
        for kernel in kernels
        for variable in collect(kernel, Var)
    )


def _joined(module: IRModule, name: str) -> IRModule:
    """Join the launches of a function; return the module itself if they cannot be joined."""
    before = module.functions[name]
    found = _Launches()
    if not found.read(before.body) or not _alike(module, found.launches):
        return module
    of_kernel: dict[str, list[LaunchKernelStmt]] = {}
    for launch in found.launches:
        of_kernel.setdefault(launch.func_var.name, []).append(launch)
    # Launches of one kernel have neighbouring blocks, so that its body is there once.
    launches = [launch for own in of_kernel.values() for launch in own]
    begins: dict[int, Expr] = {}
    blocks: Expr = int32(0)
    for launch in launches:
        begins[id(launch)] = simplify(blocks)
        x, y, z = launch.grid_dim
        blocks = blocks + x * y * z
    parameters = _Parameters()
    functions: dict[str, Function] = {}
    bodies: list[tuple[Expr, Stmt]] = []
    for kernel_name, own in of_kernel.items():
        kernel = module.functions[kernel_name]
        functions[kernel_name] = device = _of_device(kernel)
        begin = [parameters(begins[id(launch)], int32) for launch in own]
        given = [
            _chosen(begin, [parameters(launch.args[position], parameter.type) for launch in own])
            for position, parameter in enumerate(kernel.params)
        ]
        x, y, _ = (_chosen(begin, [parameters(launch.grid_dim[dim], int32) for launch in own]) for dim in range(3))
        number = _BLOCK_X - _chosen(begin, begin)
        index = [simplify(one) for one in (number % x, number // x % y, number // (x * y))]
        variable = Var(hint=None, type=FuncType.from_func(device), name=kernel_name)
        bodies.append((begin[0], EvaluateStmt(call(variable, [*given, *index]))))
    body = _one_of(bodies)
    first = launches[0]
    shared = max(int(launch.shared_mem_bytes) for launch in launches)
    grid, one = (simplify(blocks), int32(1), int32(1)), (int32(1), int32(1), int32(1))
    attributes = {
        "func_kind": "cuda_kernel",
        # A bound that the kernel may assume: the host's variables are not the kernel's.
        "cuda.grid_dim": int(grid[0]) if is_constant(grid[0]) else _MOST_BLOCKS,
        "cuda.block_dim": [int(extent) for extent in first.block_dim],
        "cuda.dynamic_smem_bytes": shared,
    }
    joint_name = f"{first.func_var.name}_together"
    functions[joint_name] = Function(joint_name, parameters.made, body, VoidType(), "cuda_kernel", attributes)
    result = module.copy()
    launched = {function.name for function in module.functions.values() if function.kind == "cuda_kernel"}
    result.functions = {name: one for name, one in module.functions.items() if name not in launched and one != before}
    result.functions.update(functions)
    result.global_vars = {name: one for name, one in module.global_vars.items() if name not in launched}
    together: Stmt = LaunchKernelStmt(
        result.lookup_var(joint_name), parameters.arguments, grid, one, first.block_dim, int32(shared), first.target
    )
    for variables in reversed(found.bound):
        together = LetStmt([variables[0]], [variables[1]], together)
    result.functions[name] = Function(name, before.params, together, before.ret_type, "public", dict(before.attrs))
    return result


def _one_of(bodies: Sequence[tuple[Expr, Stmt]]) -> Stmt:
    """Choose a statement by the block: each is for the blocks from its first one on."""
    body = bodies[-1][1]
    for (_, stmt), (begin_after, _) in reversed(list(itertools.pairwise(bodies))):
        body = IfStmt(begin_after > _BLOCK_X, stmt, body)
    return body


class _Parameters:
    """The parameters of the joint kernel, one for each argument that is no number, and these arguments."""

    def __init__(self) -> None:
        self.made: list[Var] = []
        self.arguments: list[Expr] = []

    def __call__(self, argument: Expr, of_type: Any) -> Expr:
        """Return what stands for an argument in the kernel: the number that it is, or a parameter."""
        if isinstance(argument, Constant):
            return argument
        for parameter, known in zip(self.made, self.arguments, strict=True):
            if known is argument and str(parameter.type) == str(of_type):
                return parameter
        self.made.append(Var(f"p{len(self.made)}", of_type))
        self.arguments.append(argument)
        return self.made[-1]


def _chosen(begins: Sequence[Expr], values: Sequence[Expr]) -> Expr:
    """Of a value for each launch of a kernel, take that of the launch that has the block."""
    value = values[-1]
    for begin, other in zip(reversed(begins[1:]), reversed(values[:-1]), strict=True):
        value = value if _same(other, value) else if_then_else(begin > _BLOCK_X, other, value)
    return value


def _same(a: Expr, b: Expr) -> bool:
    return a is b or (isinstance(a, Constant) and isinstance(b, Constant) and a.value == b.value)


def _of_device(kernel: Function) -> Function:
    """Make a function of a kernel, which takes the number of its block."""
    place = [Var(name.replace(".", "_"), int32) for name in _BLOCK]
    body = _WithBlock(dict(zip(_BLOCK, place, strict=True))).visit(kernel.body)
    return Function(kernel.name, [*kernel.params, *place], body, VoidType(), "cuda_internal", {})


class _WithBlock(IRRewriter):
    """Puts variables in the place of the block's numbers."""

    def __init__(self, place: dict[str, Var]):
        super().__init__()
        self.place = place

    def visit_Var(self, e: Var) -> Expr:
        return self.place.get(e.name, e) if isinstance(e.name, str) else e
