"""Exchanges of wanted rows on GPUs: kernels pack and unpack the rows that NCCL sends as they are.

See ``hidet_dist/kernels/cuda/row_exchange.h``. What is packed is an activation with room for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.partitioning.collective_op import CollectiveOp, Reduce, product_of
from hidet_dist.partitioning.row_exchange import ROW_EXCHANGES, RowExchangeOp
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import Extent, extents_of
from hidet_dist.traits import has_traits

_NAMESPACE = "hidet_dist::cuda::row_exchange"
_HEADER = "hidet_dist/kernels/cuda/row_exchange.h"
_WORDS = {16: "uint4", 8: "uint2", 4: "uint32_t", 2: "uint16_t", 1: "uint8_t"}
_SUMS = {  # the types of elements and of their sums; those of integers wrap around
    "float32": "float, float",
    "float64": "double, double",
    "float16": "__half, float",
    "bfloat16": "__nv_bfloat16, float",
    "int8": "int8_t, uint32_t",
    "uint8": "uint8_t, uint32_t",
    "int32": "int32_t, uint32_t",
    "int64": "int64_t, uint64_t",
    "bool": "bool, bool",
}


@has_traits(kernel="copy")
class RowKernelOp(NativeCallOp):
    """A kernel before or behind an exchange of packed rows.

    Parameters
    ----------
    tensors: Tensor
        The rows that the kernel reads, then the mask; the function gets them in this order, and then the output.
    function: str
        A function of the header: ``pack``, ``unpack`` or ``add``.
    group: (sequence of int, int)
        The mesh axes of the exchange, and the number of ranks.
    of_others: bool
        Whether the packed rows are those of other ranks that this one wants, and else those of this rank.
    shape: sequence of int or expression
        The shape of the output.
    """

    def __init__(
        self,
        *tensors: Tensor,
        function: str,
        group: tuple[Sequence[int], int],
        of_others: bool,
        shape: Sequence[Extent],
    ):
        *sources, wanted = tensors
        dtype, row = sources[0].dtype, extents_of(sources[0])[1:]
        mesh_axes, group_size = group
        mask = native.group_code(mesh_axes)
        if function == "add":
            types, count = _SUMS[dtype.name], product_of(row)
        else:
            width = _width(row, int(dtype.nbytes))
            types, count = _WORDS[width], product_of([*row, int(dtype.nbytes)]) // width
        pointer = types.split(",")[0]
        opened = "".join(f"const void *of_{number} = (const void *)({{}}); " for number in range(len(tensors)))
        pointers = "".join(f"(const {pointer} *)of_{number}, " for number in range(len(sources)))
        wanted_of = (
            f"(const uint8_t *)of_{len(sources)}, {group_size}, whole_rows / {group_size}, "
            f"hidet_dist_group_rank({mask}), {str(of_others).lower()}"
        )
        statement = (
            f"{opened}void *of_result = (void *)({{}}); const {_NAMESPACE}::Wanted exchanged = {{{{ {wanted_of} }}}}; "
            f"{_NAMESPACE}::{function}<{types}>(exchanged, {pointers}({pointer} *)of_result, row);"
        )
        call = NativeCall.of_library(
            statement,
            (_HEADER, "hidet_dist/collectives.h"),
            {"whole_rows": product_of([extents_of(wanted)[1]]), "row": count},
        )
        words = ["hidet_dist", function, "of_others" if of_others else "own", f"axes{mask}", f"of{group_size}"]
        super().__init__(
            "_".join([*words, f"abi{native.ABI_VERSION}"]),
            {**{f"rows{number}": x for number, x in enumerate(sources)}, "wanted": wanted},
            shape,
            call,
            {"function": function, "group": group, "of_others": of_others, "shape": list(shape)},
        )
        self.name = f"{function.capitalize()}Rows"


class PackedRowExchangeOp(CollectiveOp):
    """An exchange of wanted rows that are packed, one after the other, as the kernels before and behind it have them.

    The host must know how many rows there are. So the call waits until the mask is computed, and no CUDA graph can
    contain it.

    Parameters
    ----------
    x: Tensor
        The rows to send, with room for all rows of the other ranks.
    wanted: Tensor
        The mask; see :class:`RowExchangeOp`.
    kind, mesh_axes, group_size:
        Those of the exchange.
    """

    can_be_captured = False

    def __init__(self, x: Tensor, wanted: Tensor, kind: str, mesh_axes: Sequence[int], group_size: int):
        self.kind = kind
        self.collective = ROW_EXCHANGES[kind]
        self.mesh_axes = tuple(mesh_axes)
        self.group_size = group_size
        self.reduce_op = ""  # a kernel adds up what is received
        group = native.group_code(self.mesh_axes)
        first, *row = extents_of(x)
        statement = (
            f"hidet_dist_{kind.removesuffix('rows')}packed_rows({{}}, (const uint8_t *)({{}}), {{}}, "
            f"whole_rows / {group_size}, row_bytes, {native.dtype_code('uint8')}, {group});"
        )
        super().__init__(
            f"hidet_dist_packed_{kind}_axes{group}_of{group_size}_abi{native.ABI_VERSION}",
            {"x": x, "wanted": wanted},
            [first, *row],
            NativeCall.of_library(
                statement,
                ("hidet_dist/collectives.h",),
                {
                    "whole_rows": product_of([extents_of(wanted)[1]]),
                    "row_bytes": product_of([*row, int(x.dtype.nbytes)]),
                },
            ),
            {"kind": kind, "mesh_axes": list(self.mesh_axes), "group_size": group_size},
        )
        self.name = "".join(word.capitalize() for word in kind.split("_"))

    def whole_nbytes(self, sent_nbytes: int) -> int:
        """Count the bytes of all rows of the group, as if every rank wanted each; see :class:`CollectiveOp`."""
        return sent_nbytes // max(1, self.group_size - 1) * self.group_size

    def result(self, inputs: Sequence[Sequence[np.ndarray]], group_rank: int, reduce: Reduce) -> np.ndarray:
        """Compute what one rank of the group receives; see :meth:`CollectiveOp.result`. Behind it are zeros."""
        received = np.zeros_like(inputs[group_rank][0])
        end = 0
        for sender, (packed, mask) in enumerate(inputs):
            sizes = [self._count(mask, sender, rank) for rank in range(self.group_size)]
            first, size = sum(sizes[:group_rank]), sizes[group_rank]
            received[end : end + size] = packed[first : first + size]
            end += size
        return received

    def _count(self, mask: np.ndarray, sender: int, receiver: int) -> int:
        """Count the rows that a rank sends to another one."""
        if sender == receiver:
            return 0
        wants, has = (receiver, sender) if self.collective.joins else (sender, receiver)
        return int(np.count_nonzero(np.split(mask[wants], self.group_size)[has]))


def _width(row: Sequence[Extent], nbytes: int) -> int:
    """Return the bytes that a thread copies at once: rows begin at multiples of them."""
    size = nbytes * math.prod(extent for extent in row if isinstance(extent, int))
    return math.gcd(size, max(_WORDS))


def pack_row_exchanges(graph: FlowGraph) -> FlowGraph:
    """Replace each exchange of wanted rows; return ``graph`` itself if it has none."""

    def packed(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, RowExchangeOp):
            return None
        x, wanted = (replaced.get(one, one) for one in op.inputs)
        gathers = op.collective.joins
        rows = extents_of(x)[0] if gathers else op.attrs["extent"]
        room = [max(1, op.group_size - 1) * rows, *extents_of(x)[1:]]
        group = op.mesh_axes, op.group_size
        sent = RowKernelOp(x, wanted, function="pack", group=group, of_others=not gathers, shape=room).outputs[0]
        received = PackedRowExchangeOp(sent, wanted, op.kind, *group).outputs[0]
        function, shape = "unpack" if gathers else "add", extents_of(op.outputs[0])
        y: Tensor = RowKernelOp(
            x, received, wanted, function=function, group=group, of_others=gathers, shape=shape
        ).outputs[0]
        return y

    return rewrite(graph, packed)
