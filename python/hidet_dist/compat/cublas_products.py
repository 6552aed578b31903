"""hidet 0.6.1 has cuBLAS among the candidates of matrix products, in a form that needs hidet's Python at run time.

Its candidates look for cuBLAS in the path that hidet's Python sets, end the process if there is none or on an error,
make a handle for every device of the host, and let cuBLAS allocate memory while it runs. Here they are removed. If
cuBLAS is wanted, each product has another last candidate, which calls :file:`hidet_dist/cublas.h`. Operators that hidet
fuses with a product are then separate kernels in the same launch, except those that only rename memory or broadcast a
matrix.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from hidet.graph import Operator, Tensor
from hidet.graph.ops.fusion.apply_prologue_epilogue import PrologueEpilogueNotFuseRewriter
from hidet.graph.ops.fusion.fused_operator import FusedTask
from hidet.graph.ops.matmul.cuda_batch_matmul import BatchMatmulTask
from hidet.graph.ops.transform import BroadcastTask, IdentityTask
from hidet.graph.ops.utils import schedule_utils
from hidet.ir.dtypes import int64
from hidet.ir.expr import Expr, is_true
from hidet.ir.library import tune
from hidet.ir.module import IRModule
from hidet.ir.primitives import is_primitive_function
from hidet.ir.primitives.func import call_primitive_func, register_primitive_function
from hidet.ir.task import Target, Task
from hidet.ir.type import FuncType, void_p

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, launch_module
from hidet_dist.compat.replacing import replaced

# Not by attribute: hidet.graph.ops.matmul may have a function of the same name.
_resolve: Any = importlib.import_module("hidet.graph.ops.matmul.resolve")
_fusion: Any = importlib.import_module("hidet.graph.ops.fusion.apply_prologue_epilogue")
_HALF = "hidet.graph.ops.matmul.matmul_f16_cute_experimental"
DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes of products that cuBLAS can compute here."""
_SCRATCH = "hidet_dist_scratch"
Extent: TypeAlias = "int | Expr"


def is_product(task: Task) -> bool:
    """Whether a task is a product of matrices, without operators fused with it."""
    half = sys.modules.get(_HALF)  # not imported here, as that takes seconds
    return isinstance(task, BatchMatmulTask) or (half is not None and isinstance(task, half.MatmulF16CuteTask))


@dataclass(frozen=True)
class Product:
    """The arguments of ``hidet_dist_cublas_product`` for a product of matrices.

    Attributes
    ----------
    dtype: the name of the operands' and the result's dtype.
    batch, m, n, k: the extents.
    batch_a, batch_b: elements from one matrix to the next; 0 for a single matrix.
    transposed: whether b is stored column by column.
    """

    dtype: str
    batch: Extent
    m: Extent
    n: Extent
    k: Extent
    batch_a: Extent
    batch_b: Extent
    transposed: bool


def product_of(task: Task) -> Product | None:
    """Describe a task as one call of cuBLAS, without operators fused with it; None if it is not such a product.

    Several matrices times the same one are a single product of many rows: [4, 8, m, k] by [4, 1, k, n] is four products
    of 8 m rows.
    """
    anchor, single_a, single_b = task, False, False
    if isinstance(task, FusedTask):
        operator = task.fused_graph.nodes[task.anchor]
        anchor = operator.task
        if is_product(anchor):
            single_a, single_b = (_source(x)[1] for x in operator.inputs)
    if not is_product(anchor):
        return None
    a, b = anchor.inputs
    transposed = bool(anchor.attrs.get("transpose_b", False))
    dtype = a.type.dtype.name
    if dtype != b.type.dtype.name or dtype not in DTYPES:
        return None
    m, k = a.shape[-2:]
    n = b.shape[-2] if transposed else b.shape[-1]
    rank = max(len(a.shape), len(b.shape)) - 2
    heads_a, heads_b = ([1] * (rank + 2 - len(x.shape)) + list(x.shape[:-2]) for x in (a, b))
    single_a = single_a or all(_is(extent, 1) for extent in heads_a)
    while heads_b and (_is(heads_b[-1], 1) or single_b) and not (single_a and not _is(heads_a[-1], 1)):
        heads_b.pop()
        m = heads_a.pop() * m
    if not single_a and not all(_is(x, y) for x, y in zip(heads_a, heads_b, strict=True)):
        return None
    apart = 0 if single_b or not heads_b else k * n
    return Product(dtype, _size(heads_b), m, n, k, 0 if single_a else m * k, apart, transposed)


def _is(extent: Extent, other: Extent) -> bool:
    return bool(is_true(extent == other))


def _size(extents: Sequence[Extent]) -> Extent:
    size: Extent = 1
    for extent in extents:
        size = extent * size
    return size


def _source(tensor: Tensor) -> tuple[Tensor, bool]:
    """Find the row-major tensor of an operand, and whether it is one matrix that is broadcast."""
    renamed = _renamed(tensor)
    matrix = tensor
    while matrix.op is not None and isinstance(matrix.op.task, IdentityTask | BroadcastTask):
        before = matrix.op.inputs[0]
        if len(before.shape) < 2 or not all(map(_is, before.shape[-2:], tensor.shape[-2:])):
            break
        matrix = before
    if matrix is not tensor and all(_is(extent, 1) for extent in matrix.shape[:-2]):
        return _renamed(matrix), True
    return renamed, False


def _renamed(tensor: Tensor) -> Tensor:
    """Find the tensor whose memory a renaming operator's output can share."""
    while tensor.op is not None and _renames(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def _renames(operator: Operator) -> bool:
    if isinstance(operator.task, BroadcastTask):
        return _is(_size(operator.inputs[0].shape), _size(operator.outputs[0].shape))
    return isinstance(operator.task, IdentityTask)


class _Apart(PrologueEpilogueNotFuseRewriter):
    """Launches the anchor, and fused operators before and after it as separate kernels."""

    def generate_sub_graphs(self, anchor_module: IRModule) -> list[Any]:
        graph, anchor, sub_graph = self.fused_graph, self.anchor_operator, self.SubGraph
        (result,) = anchor.outputs
        inputs = [_source(x)[0] for x in anchor.inputs]
        # The product is written to an output that equals it, if there is one; other outputs read it from there.
        named = [y for y in graph.outputs if _renamed(y) is result]
        written = named[0] if len(graph.outputs) == len(named) == 1 else result
        return [
            *(sub_graph.from_trace(x, graph.inputs) for x in dict.fromkeys(inputs) if x not in graph.inputs),
            sub_graph(inputs, [written], [anchor], anchor_module),
            *(sub_graph.from_trace(y, [result, *graph.inputs]) for y in graph.outputs if y is not written),
        ]


def _candidate(task: Task, product: Product, target: Target | str, working_dir: str) -> IRModule:
    anchor = task.fused_graph.nodes[task.anchor].task if isinstance(task, FusedTask) else task
    names = ("batch", "m", "n", "k", "batch_a", "batch_b")
    code = native.dtype_code(product.dtype)
    as_tf32 = str(anchor.attrs.get("mma", "simt")).startswith("mma")  # as hidet's kernels compute then
    call = NativeCall.of_library(
        f"hidet_dist_cublas_product({code}, {int(as_tf32)}, batch, m, n, k, "
        f"{{}}, batch_a, {{}}, batch_b, {int(product.transposed)}, {{}});",
        ("hidet_dist/cublas.h", "hidet_dist/kernels/scratch.h"),
        {name: getattr(product, name) for name in names},
    )
    module = launch_module(call, [*anchor.inputs, *anchor.outputs], typed=True)
    if isinstance(task, FusedTask):
        place = Target.from_string(target) if isinstance(target, str) else target
        with replaced(_fusion, {"request_cuda_workspace": _scratch}):
            module = _Apart(task, place, working_dir).rewrite(module)
    module.task = task
    return module


def _scratch(nbytes: Extent) -> Expr:
    """Scratch memory of the partition: hidet's is shared by the process, and moves when a graph needs more."""
    if not is_primitive_function(_SCRATCH):
        register_primitive_function(_SCRATCH, FuncType([int64], void_p), codegen_name=_SCRATCH)
    return call_primitive_func(_SCRATCH, [nbytes])


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise tune.ScheduleError("hidet's own call of cuBLAS")


_dtypes: tuple[str, ...] = ()


def cublas_dtypes() -> tuple[str, ...]:
    """The dtypes of the products that have a candidate by cuBLAS at present."""
    return _dtypes


@contextmanager
def cublas_products(dtypes: Sequence[str]) -> Iterator[None]:
    """While the block runs, products of these dtypes have one candidate by cuBLAS, and others have none.

    Where float32 is among them, its products are not split along k into several: cuBLAS does that itself where it
    helps.
    """

    def with_cublas(kind: type[Task]) -> dict[str, Any]:
        implement_before = kind.implement

        def implement(task: Task, target: Target | str, working_dir: str) -> list[IRModule]:
            modules: list[IRModule] = implement_before(task, target, working_dir)
            product = product_of(task)
            if product is None or product.dtype not in dtypes:
                return modules
            return [*modules, _candidate(task, product, target, working_dir)]

        return {"implement": implement}

    whole = {"parallel_k_heuristic_nparts": lambda *_: 1} if "float32" in dtypes else {}
    with (
        replaced(schedule_utils, {"get_cublas_matmul_schedule": _refuse}),
        replaced(sys.modules[__name__], {"_dtypes": tuple(dtypes)}),
        replaced(FusedTask, with_cublas(FusedTask) if dtypes else {}),
        replaced(Task, with_cublas(Task) if dtypes else {}),
        replaced(_resolve, whole),
    ):
        yield
