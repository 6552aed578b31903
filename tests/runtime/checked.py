"""Collectives of one rank, each checked against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hidet_dist import native
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.mesh_groups import group_ranks

NUMPY_REDUCE: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
    "mean": np.mean,
}


def address(array: np.ndarray | torch.Tensor) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else int(array.ctypes.data)


def as_dtype(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values).to(getattr(torch, dtype), copy=True).contiguous()


def inputs(rank: int, count: int, dtype: str) -> np.ndarray:
    """A rank's data: integers so small that no dtype overflows, and rounds only means, whatever is done with them."""
    low, high = {"bool": (0, 2), "uint8": (0, 4)}.get(dtype, (-3, 4))
    return np.random.default_rng(rank + 1).integers(low, high, size=count).astype(np.float64)


def with_nan(values: np.ndarray, rank: int) -> np.ndarray:
    """A rank's data with NaN in a place of its own, and in one of all ranks."""
    values[[rank + 1, 0]] = np.nan
    return values


def reduced(stack: np.ndarray, dtype: str, op: str) -> np.ndarray:
    values = NUMPY_REDUCE[op](stack, axis=0)
    if op == "mean" and "int" in dtype:
        return np.trunc(values)
    return np.minimum(values, 1) if dtype == "bool" else values


class Checked:
    """Collectives of one rank in one group, each checked against NumPy; ``host`` memory also in blocks side by side."""

    def __init__(self, comm: Communicator, mesh: tuple[int, ...], group: int, host: bool = True):
        self.comm, self.host = comm, host
        self.group = group
        self.ranks = group_ranks(mesh, comm.rank, group)
        self.size, self.group_rank = len(self.ranks), self.ranks.index(comm.rank)
        self.calls = 0

    def call(self, function: Callable[..., int], *arguments: int | native.Blocks | Sequence[int] | None) -> None:
        assert function(*arguments, self.group) == native.OK, native.last_error()
        self.comm.wait()
        self.calls += 1

    def everything(self) -> None:
        for dtype in native.DTYPE_CODES:
            for op in native.REDUCE_OP_CODES:
                if (dtype, op) != ("bool", "mean"):
                    self.reductions(dtype, op, count=5)
            self.moves(dtype, count=5)
            if self.host:
                self.blocks(dtype)
                self.rows(dtype, rows=3, row=5)
            self.parts(dtype)
            self.packed_rows(dtype, rows=3, row=5)
            self.messages(dtype, count=5)

    def expect(self, got: torch.Tensor, expected: torch.Tensor, *label: object) -> None:
        same = torch.equal(got, expected) or torch.allclose(got, expected, 0, 0, equal_nan=True)
        assert same, f"{label} over {self.ranks}: {got} is not {expected}"

    def reductions(self, dtype: str, op: str, count: int) -> None:
        codes = native.dtype_code(dtype), native.reduce_op_code(op)
        whole = [inputs(rank, count * self.size, dtype) for rank in self.ranks]
        if op in ("max", "min") and "float" in dtype and self.host:
            whole = [with_nan(values, rank) for rank, values in enumerate(whole)]
        send = as_dtype(whole[self.group_rank], dtype)
        recv = torch.zeros_like(send)
        expected = as_dtype(reduced(np.stack(whole), dtype, op), dtype)
        self.call(native.all_reduce, address(send), address(recv), count * self.size, *codes)
        self.expect(recv, expected, "all_reduce", dtype, op)
        self.call(native.all_reduce, address(send), address(send), count * self.size, *codes)
        self.expect(send, expected, "all_reduce over itself", dtype, op)
        send = as_dtype(whole[self.group_rank], dtype)
        recv = torch.zeros(count, dtype=send.dtype)
        self.call(native.reduce_scatter, address(send), address(recv), count, *codes)
        self.expect(
            recv, expected[self.group_rank * count : (self.group_rank + 1) * count], "reduce_scatter", dtype, op
        )

    def moves(self, dtype: str, count: int) -> None:
        code, size, group_rank = native.dtype_code(dtype), self.size, self.group_rank
        whole = [as_dtype(inputs(rank, count * size, dtype), dtype) for rank in self.ranks]
        send = whole[group_rank]
        recv = torch.zeros(size * size * count, dtype=send.dtype)
        self.call(native.all_gather, address(send), address(recv), size * count, code)
        self.expect(recv, torch.cat(whole), "all_gather", dtype)
        recv = torch.zeros_like(send)
        self.call(native.all_to_all, address(send), address(recv), count, code)
        parts = [values[group_rank * count : (group_rank + 1) * count] for values in whole]
        self.expect(recv, torch.cat(parts), "all_to_all", dtype)
        for root in range(size):
            recv = torch.zeros_like(send)
            source = address(send) if group_rank == root else 0
            self.call(native.broadcast, source, address(recv), count * size, code, root)
            self.expect(recv, whole[root], "broadcast", dtype, root)
            in_place = send.clone()
            self.call(native.broadcast, address(in_place), address(in_place), count * size, code, root)
            self.expect(in_place, whole[root], "broadcast over itself", dtype, root)

    def blocks(self, dtype: str, rows: int = 3, row: int = 5) -> None:
        """Blocks side by side, as shards along an inner dim lie; the last is shorter where it may be."""
        code, size, group_rank = native.dtype_code(dtype), self.size, self.group_rank
        whole = [
            as_dtype(inputs(rank, rows * size * row, dtype), dtype).reshape(rows, size * row) for rank in self.ranks
        ]
        own = [values[:, group_rank * row : (group_rank + 1) * row] for values in whole]
        every = native.Blocks(rows, row, size * row)
        for cut in (0, row - 1):
            most = size * row - cut
            some = native.Blocks(rows, row, most)
            send = own[group_rank].contiguous()
            recv = torch.zeros((rows, most), dtype=send.dtype)
            self.call(native.all_gather_blocks, address(send), address(recv), some, code)
            shards = [values[:, rank * row : (rank + 1) * row] for rank, values in enumerate(whole)]
            self.expect(recv, torch.cat(shards, 1)[:, :most], "all_gather", dtype)
            recv = torch.zeros((rows, most), dtype=send.dtype)
            self.call(native.all_to_all_blocks, address(whole[group_rank]), every, address(recv), some, code)
            self.expect(recv, torch.cat(own, 1)[:, :most], "all_to_all", dtype)
        for op in ("sum", "max"):
            recv = torch.zeros((rows, row), dtype=whole[0].dtype)
            codes = code, native.reduce_op_code(op)
            self.call(native.reduce_scatter_blocks, address(whole[group_rank]), address(recv), every, *codes)
            stack = np.stack([inputs(rank, rows * size * row, dtype) for rank in self.ranks])
            expected = as_dtype(reduced(stack, dtype, op), dtype).reshape(rows, size * row)
            self.expect(recv, expected[:, group_rank * row : (group_rank + 1) * row], "reduce_scatter", dtype, op)
        # One side only.
        recv = torch.zeros((size, rows, row), dtype=whole[0].dtype)
        self.call(native.all_to_all_blocks, address(whole[group_rank]), every, address(recv), None, code)
        self.expect(recv, torch.stack(own), "all_to_all, sent", dtype)
        behind = torch.stack([whole[group_rank][:, rank * row : (rank + 1) * row] for rank in range(size)]).contiguous()
        recv = torch.zeros((rows, size * row), dtype=whole[0].dtype)
        self.call(native.all_to_all_blocks, address(behind), None, address(recv), every, code)
        self.expect(recv, torch.cat(own, 1), "all_to_all, received", dtype)

    def parts(self, dtype: str, unit: int = 3) -> None:
        """Parts of unequal size; one of them is empty where there are more than two."""
        code, size, group_rank = native.dtype_code(dtype), self.size, self.group_rank
        joined = [1 + 2 * rank for rank in range(size)]
        split = [size - rank if rank != 1 or size < 3 else 0 for rank in range(size)]
        for large in (1, 2000):  # Gloo has another way for large parts
            step = unit * large
            whole = [as_dtype(inputs(rank, joined[p] * step, dtype), dtype) for p, rank in enumerate(self.ranks)]
            recv = torch.zeros(sum(joined) * step, dtype=whole[0].dtype)
            self.call(native.all_gather_parts, address(whole[group_rank]), address(recv), joined, step, code)
            self.expect(recv, torch.cat(whole), "all_gather_parts", dtype)
            stack = np.stack([inputs(rank, sum(split) * step, dtype) for rank in self.ranks])
            for op in ("sum", "max"):
                send = as_dtype(stack[group_rank], dtype)
                recv = torch.zeros(max(1, split[group_rank] * step), dtype=send.dtype)
                codes = code, native.reduce_op_code(op)
                self.call(native.reduce_scatter_parts, address(send), address(recv), split, step, *codes)
                expected = as_dtype(reduced(stack, dtype, op), dtype).split([each * step for each in split])
                self.expect(recv[: split[group_rank] * step], expected[group_rank], "reduce_scatter_parts", dtype, op)
            sent = [
                as_dtype(inputs(rank, joined[p] * sum(split) * step, dtype), dtype).split(
                    [joined[p] * each * step for each in split]
                )
                for p, rank in enumerate(self.ranks)
            ]
            send, expected = torch.cat(sent[group_rank]), torch.cat([blocks[group_rank] for blocks in sent])
            recv = torch.zeros(max(1, len(expected)), dtype=send.dtype)
            self.call(native.all_to_all_parts, address(send), address(recv), split, joined, step, code)
            self.expect(recv[: len(expected)], expected, "all_to_all_parts", dtype)

    def rows(self, dtype: str, rows: int, row: int) -> None:
        """Rows that none wants, some, or all; what a rank has in place of those it does not want must not be read."""
        code, size, group_rank = native.dtype_code(dtype), self.size, self.group_rank
        for share in (0.0, 0.4, 1.0):
            wanted = (np.random.default_rng(size).random((size, size * rows)) < share).astype(np.uint8)
            mask = torch.from_numpy(wanted != 0).unsqueeze(2)
            shards = [as_dtype(inputs(rank, rows * row, dtype), dtype).reshape(rows, row) for rank in self.ranks]
            whole = torch.cat(shards)
            recv = torch.ones_like(whole)
            self.call(native.gather_rows, address(shards[group_rank]), address(wanted), address(recv), rows, row, code)
            self.expect(recv, torch.where(mask[group_rank], whole, whole.new_zeros(())), "gather_rows", dtype, share)
            stack = np.stack([inputs(rank, size * rows * row, dtype) for rank in self.ranks])
            masked = stack.reshape(size, size * rows, row) * wanted[:, :, None]
            sums = as_dtype(reduced(masked, dtype, "sum"), dtype)[group_rank * rows : (group_rank + 1) * rows]
            send = as_dtype(masked[group_rank], dtype)
            send[~mask[group_rank, :, 0]] = float("nan") if send.dtype.is_floating_point else 1
            recv = torch.ones((rows, row), dtype=send.dtype)
            self.call(native.reduce_scatter_rows, address(send), address(wanted), address(recv), rows, row, code)
            self.expect(recv, sums, "reduce_scatter_rows", dtype, share)

    def packed_rows(self, dtype: str, rows: int, row: int) -> None:
        """Rows that are packed before the exchange, as on devices."""
        code, size, own = native.dtype_code(dtype), self.size, self.group_rank
        others = [rank for rank in range(size) if rank != own]
        for share in (0.0, 0.4, 1.0):
            wanted = as_dtype(np.random.default_rng(size).random((size, size, rows)) < share, "uint8")
            mask = wanted != 0
            shape = size, rows, row
            whole = [as_dtype(inputs(rank, size * rows * row, dtype), dtype).reshape(shape) for rank in self.ranks]
            exchanges = (
                (
                    native.gather_packed_rows,
                    [whole[own][0][mask[rank, own]] for rank in others],
                    [whole[rank][0][mask[own, rank]] for rank in others],
                ),
                (
                    native.reduce_scatter_packed_rows,
                    [whole[own][rank][mask[own, rank]] for rank in others],
                    [whole[rank][own][mask[rank, own]] for rank in others],
                ),
            )
            for function, sent, received in exchanges:
                end = whole[own].new_zeros((1, row))  # no buffer is empty
                send, expected = torch.cat([*sent, end]), torch.cat([*received, end])
                recv = torch.zeros_like(expected)
                self.call(function, address(send), address(wanted), address(recv), rows, row, code)
                self.expect(recv, expected, function.__name__, dtype, share)

    def messages(self, dtype: str, count: int) -> None:
        code, size, group_rank = native.dtype_code(dtype), self.size, self.group_rank
        # A message's length depends on who sends it.
        whole = [as_dtype(inputs(rank, count + rank, dtype), dtype) for rank in self.ranks]
        own = whole[group_rank]
        for step in range(size):  # 0: to itself
            to, from_ = (group_rank + step) % size, (group_rank - step) % size
            recv = torch.zeros_like(whole[from_])
            arguments = (address(own), own.numel(), to, address(recv), recv.numel(), from_, code)
            self.call(native.send_recv, *arguments)
            self.expect(recv, whole[from_], "send_recv", dtype, step)
        # Down a chain, whose ends have nothing to receive and to send.
        to = group_rank + 1 if group_rank + 1 < size else native.NOBODY
        recv = torch.zeros_like(whole[group_rank - 1])
        self.call(native.send_recv, address(own), own.numel(), to, address(recv), recv.numel(), group_rank - 1, code)
        self.expect(recv, whole[group_rank - 1] if group_rank else torch.zeros_like(recv), "chain", dtype)
        if size == 1:
            return
        # From all to the first, two from each: they come in the order of sending.
        for sender in range(1, size):
            for scale in (1, 2):
                if group_rank == sender:
                    message = own[: own.numel() // scale].clone()
                    self.call(native.send, address(message), message.numel(), code, 0)
                elif group_rank == 0:
                    recv = torch.zeros_like(whole[sender][: whole[sender].numel() // scale])
                    self.call(native.recv, address(recv), recv.numel(), code, sender)
                    self.expect(recv, whole[sender][: recv.numel()], "recv", dtype, sender)
