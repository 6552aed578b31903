"""The C interface of the library of kernels as data: one table per header in ``include/hidet_dist``.

A table lists every function, structure, callback type and integer constant that its header declares, under the C name
without its prefix. ``tests/native`` parses the headers and compares them with the tables, in both directions,
so a change of a header requires a change of its table.

Pointers to ``void`` and to opaque structures are ``c_void_p``; pointers to ``char`` are ``c_char_p``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p
from typing import Any, NamedTuple

from hidet_dist.native.interface import Header, Signature

# collectives.h


class Blocks(ctypes.Structure):
    """``hidet_dist_blocks``: the blocks of a group's ranks, side by side in ``rows`` rows of ``whole`` elements.

    The block of group rank p has ``row`` elements of each row, from p * row on.
    """

    _fields_ = (("rows", c_int64), ("row", c_int64), ("whole", c_int64))


BlocksPointer = POINTER(Blocks)


class Envelope(ctypes.Structure):
    """``hidet_dist_envelope``: a rank's description of its collective for the other ranks."""

    _fields_ = (
        ("call", c_int64),
        ("count", c_int64),
        ("root", c_int32),
        ("kind", c_uint8),
        ("dtype", c_uint8),
        ("reduce_op", c_uint8),
        ("reserved", c_uint8),
    )


EnvelopePointer = POINTER(Envelope)

# The arguments of collectives: the buffers, then the count, the dtype, ... and the group last.
_GATHER = (c_void_p, c_void_p, c_int64, c_int32, c_int32)
_REDUCE = (c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32)
_GATHER_BLOCKS = (c_void_p, c_void_p, BlocksPointer, c_int32, c_int32)
_SCATTER_BLOCKS = (c_void_p, c_void_p, BlocksPointer, c_int32, c_int32, c_int32)
_EXCHANGE_BLOCKS = (c_void_p, BlocksPointer, c_void_p, BlocksPointer, c_int32, c_int32)
_SIZES = POINTER(c_int64)
_GATHER_PARTS = (c_void_p, c_void_p, _SIZES, c_int64, c_int32, c_int32)
_SCATTER_PARTS = (c_void_p, c_void_p, _SIZES, c_int64, c_int32, c_int32, c_int32)
_EXCHANGE_PARTS = (c_void_p, c_void_p, _SIZES, _SIZES, c_int64, c_int32, c_int32)
_EXCHANGE_COUNTS = (c_void_p, c_void_p, _SIZES, c_int64, c_int32, c_int32)
MaskPointer = POINTER(c_uint8)
_EXCHANGE_ROWS = (c_void_p, MaskPointer, c_void_p, c_int64, c_int64, c_int32, c_int32)


def _method(*arguments: Any) -> Any:
    """The type of a function in a table of functions, whose first argument is the table's context."""
    return ctypes.CFUNCTYPE(c_int32, c_void_p, *arguments)


class _Forms(NamedTuple):
    """The arguments of a kind of collective: for equal contiguous blocks, and, if it joins or splits a dim, others."""

    plain: tuple[Any, ...]
    parts: tuple[Any, ...] | None = None  # of unequal size
    blocks: tuple[Any, ...] | None = None  # side by side in host memory


# The collectives of a group that every transport has, in the order of their codes in hidet_dist_collective.
_KINDS = {
    "all_reduce": _Forms(_REDUCE),
    "all_gather": _Forms(_GATHER, _GATHER_PARTS, _GATHER_BLOCKS),
    "reduce_scatter": _Forms(_REDUCE, _SCATTER_PARTS, _SCATTER_BLOCKS),
    "all_to_all": _Forms(_GATHER, _EXCHANGE_PARTS, _EXCHANGE_BLOCKS),
    "broadcast": _Forms(_REDUCE),
}
_PLAIN = {name: forms.plain for name, forms in _KINDS.items()}
_PARTS = {f"{name}_parts": forms.parts for name, forms in _KINDS.items() if forms.parts}
_BLOCKS = {f"{name}_blocks": forms.blocks for name, forms in _KINDS.items() if forms.blocks}
_ROWS = {"gather_rows": _EXCHANGE_ROWS, "reduce_scatter_rows": _EXCHANGE_ROWS}
_PACKED_ROWS = {"gather_packed_rows": _EXCHANGE_ROWS, "reduce_scatter_packed_rows": _EXCHANGE_ROWS}
_CODES = (*_KINDS, *_ROWS, "message")  # in the order of hidet_dist_collective


def _methods(arguments: Mapping[str, tuple[Any, ...]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _method(*each)) for name, each in arguments.items())


class TransportTable(ctypes.Structure):
    """``hidet_dist_transport``: a table of functions, which its maker keeps alive as long as the communicator."""

    _fields_ = (
        ("context", c_void_p),
        *_methods(_PLAIN),
        ("send_recv", _method(c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32, c_int32)),
        *_methods({name: each for name, each in _PARTS.items() if name != "all_to_all_parts"}),
        ("all_to_all_v", _method(*_EXCHANGE_COUNTS)),
        ("copy", _method(c_void_p, c_void_p, c_int64)),
        ("read", _method(c_void_p, c_void_p, c_int64)),
        *_methods(_BLOCKS),
        *_methods(_ROWS),
    )


COLLECTIVES = Header(
    functions={
        **{
            name: Signature(c_int32, each)
            for name, each in {**_PLAIN, **_PARTS, **_BLOCKS, **_ROWS, **_PACKED_ROWS}.items()
        },
        "send": Signature(c_int32, (c_void_p, c_int64, c_int32, c_int32, c_int32)),
        "recv": Signature(c_int32, (c_void_p, c_int64, c_int32, c_int32, c_int32)),
        "send_recv": Signature(c_int32, (c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32, c_int32, c_int32)),
        "group_rank": Signature(c_int32, (c_int32,)),
        "group_size": Signature(c_int32, (c_int32,)),
        "abi_version": Signature(c_int32, ()),
        "dtype_size": Signature(c_int64, (c_int32,)),
        "communicator_create": Signature(c_void_p, (POINTER(TransportTable), POINTER(c_int64), c_int32, c_int64)),
        "communicator_destroy": Signature(None, (c_void_p,)),
        "bind": Signature(None, (c_void_p,)),
        "communicator_error": Signature(c_char_p, (c_void_p,)),
        "fail": Signature(None, (c_void_p, c_char_p)),
        "communicator_begin_call": Signature(None, (c_void_p, c_int64)),
        "current_envelope": Signature(c_int32, (EnvelopePointer,)),
        "check_envelope": Signature(c_int32, (EnvelopePointer, c_int64)),
        "communicator_out_of_step": Signature(c_int64, (c_void_p,)),
        "communicator_sequence": Signature(c_int64, (c_void_p,)),
        "communicator_peers": Signature(c_int64, (c_void_p, POINTER(c_int64), c_int64)),
        "communicator_group_size": Signature(c_int64, (c_void_p, c_int32)),
        "last_error": Signature(c_char_p, ()),
    },
    structures={"blocks": Blocks, "envelope": Envelope, "transport": TransportTable},
    constants={
        "ABI_VERSION": 7,
        "MAX_MESH_AXES": 16,
        "NOBODY": -1,
        # hidet_dist_status
        "OK": 0,
        "NO_COMMUNICATOR": 1,
        "INVALID_ARGUMENT": 2,
        "FAILED": 3,
        # hidet_dist_dtype
        "F32": 0,
        "F64": 1,
        "F16": 2,
        "BF16": 3,
        "I8": 4,
        "I32": 5,
        "I64": 6,
        "U8": 7,
        "BOOL": 8,
        # hidet_dist_collective
        **{name.upper(): code for code, name in enumerate(_CODES)},
        # hidet_dist_reduce_op
        "SUM": 0,
        "MAX": 1,
        "MIN": 2,
        "PRODUCT": 3,
        "MEAN": 4,
    },
)


# overlap.h

ForkFunction = _method()
TicketFunction = _method(c_int64)


class Overlap(ctypes.Structure):
    """``hidet_dist_overlap``: a table of functions, which its maker keeps alive as long as the communicator."""

    _fields_ = (
        ("context", c_void_p),
        ("fork", ForkFunction),
        ("mark", TicketFunction),
        ("wait", TicketFunction),
    )


OVERLAP = Header(
    functions={
        "start": Signature(c_int32, (c_void_p,)),
        "started": Signature(c_int32, (c_void_p,)),
        "wait": Signature(c_int32, (c_void_p,)),
        "communicator_set_overlap": Signature(None, (c_void_p, POINTER(Overlap))),
        "communicator_started": Signature(c_int64, (c_void_p,)),
        "communicator_waited": Signature(c_int64, (c_void_p,)),
    },
    structures={"overlap": Overlap},
)


# shared_memory.h

ConnectFunction = ctypes.CFUNCTYPE(c_int32, c_int32)
SettleFunction = ctypes.CFUNCTYPE(c_int32)

SHARED_MEMORY = Header(
    functions={
        "shm_create": Signature(
            c_void_p, (POINTER(TransportTable), ConnectFunction, ConnectFunction, c_int32, c_int32, c_double)
        ),
        "shm_table": Signature(None, (c_void_p, POINTER(TransportTable))),
        "shm_segment": Signature(c_int32, (c_int32,)),
        "shm_attach": Signature(c_int32, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
        "shm_delegate": Signature(None, (c_void_p, c_int32)),
        "shm_inbox": Signature(c_int32, (c_void_p,)),
        "shm_attach_peer": Signature(c_int32, (c_void_p, c_int32, c_int32)),
        "shm_delegate_peer": Signature(None, (c_void_p, c_int32)),
        "shm_failed_by_peer": Signature(c_int32, (c_void_p,)),
        "shm_close": Signature(None, (c_void_p,)),
        "shm_destroy": Signature(None, (c_void_p,)),
    },
    callbacks={"shm_connect": ConnectFunction},
)


# nccl.h

StreamFunction = ctypes.CFUNCTYPE(c_void_p)

NCCL = Header(
    functions={
        "nccl_load": Signature(c_int32, (c_char_p, c_char_p)),
        "nccl_device_count": Signature(c_int32, ()),
        "nccl_device_uuid": Signature(c_int32, (c_int32, c_char_p)),
        "nccl_unique_id": Signature(c_int32, (c_char_p,)),
        "nccl_create": Signature(
            c_void_p,
            (POINTER(c_int64), c_int32, c_int64, c_int32, StreamFunction, ConnectFunction, SettleFunction, c_double),
        ),
        "nccl_table": Signature(None, (c_void_p, POINTER(TransportTable))),
        "nccl_overlap": Signature(None, (c_void_p, POINTER(Overlap))),
        "nccl_has": Signature(c_int32, (c_void_p, c_int32)),
        "nccl_await": Signature(None, (c_void_p,)),
        "nccl_begin": Signature(c_int32, (c_void_p, c_int32, c_char_p)),
        "nccl_progress": Signature(c_int32, (c_void_p,)),
        "nccl_warm_up": Signature(c_int32, (c_void_p, c_int32)),
        "nccl_group_begin": Signature(c_int32, (c_void_p,)),
        "nccl_group_end": Signature(c_int32, (c_void_p,)),
        "nccl_internal_stream": Signature(c_void_p, (c_void_p,)),
        "nccl_wait": Signature(c_int32, (c_void_p, c_void_p, c_double)),
        "nccl_wait_event": Signature(c_int32, (c_void_p, c_void_p, c_double)),
        "nccl_failed_by_peer": Signature(c_int32, (c_void_p,)),
        "nccl_close": Signature(None, (c_void_p,)),
        "nccl_destroy": Signature(None, (c_void_p,)),
    },
    callbacks={"nccl_connect": ConnectFunction, "nccl_settle": SettleFunction, "nccl_stream": StreamFunction},
    constants={"NCCL_ID_BYTES": 128, "NCCL_OLDEST": 21800, "NCCL_IN_PROGRESS": 16},
)


# cublas.h

ReportFunction = ctypes.CFUNCTYPE(None, c_char_p)
AllocateFunction = ctypes.CFUNCTYPE(c_void_p, c_int64)

CUBLAS = Header(
    functions={
        "cublas_load": Signature(c_int32, (c_char_p,)),
        "cublas_create": Signature(c_void_p, (StreamFunction, ReportFunction, AllocateFunction, c_void_p, c_int64)),
        "cublas_destroy": Signature(None, (c_void_p,)),
        "cublas_bind": Signature(None, (c_void_p,)),
        "cublas_product": Signature(
            None,
            (
                *(c_int32, c_int32),  # dtype, as_tf32
                *(c_int64, c_int64, c_int64, c_int64),  # batch, m, n, k
                *(c_void_p, c_int64),  # a, batch_a
                *(c_void_p, c_int64),  # b, batch_b
                *(c_int32, c_void_p),  # transposed, c
            ),
        ),
        "cublas_scratch": Signature(c_void_p, (c_int64,)),
    },
    callbacks={
        "cublas_stream": StreamFunction,
        "cublas_report": ReportFunction,
        "cublas_allocate": AllocateFunction,
    },
    constants={"CUBLAS_OLDEST": 110000},
)


# indices.h

INDICES = Header(
    functions={
        "find_outside": Signature(
            c_int32,
            (
                *(c_void_p, c_int32, c_int32),  # data, bytes, is_signed
                *(c_int32, POINTER(c_int64), POINTER(c_int64)),  # dims, shape, strides
                *(c_int64, c_int64, POINTER(c_int64)),  # least, greatest, outside
            ),
        ),
    }
)


# mapped_file.h

MAPPED_FILE = Header(
    functions={
        "mapped_file_watch": Signature(c_void_p, (c_int32, c_void_p, c_int64, c_char_p)),
        "mapped_file_change": Signature(c_int32, (c_void_p,)),
        "mapped_file_renew": Signature(None, (c_void_p,)),
        "mapped_file_condemn": Signature(None, (c_void_p,)),
        "mapped_file_forget": Signature(None, (c_void_p,)),
        "communicator_rely_on": Signature(None, (c_void_p, c_void_p)),
    }
)


# panels.h


class PanelProduct(ctypes.Structure):
    """A part of a product of rows by panels."""

    _fields_ = (
        ("left", c_void_p),
        ("row_step", c_int64),
        ("depth_step", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("depth", c_int64),
        ("right", c_void_p),
        ("layout", c_int32),
        ("right_step", c_int64),
        ("left_dtype", c_int32),
        ("right_dtype", c_int32),
        ("result", c_void_p),
        ("result_step", c_int64),
        ("scratch", c_void_p),
        ("runs", POINTER(c_void_p)),
        ("run", c_int64),
    )


class QuantizedProduct(ctypes.Structure):
    """A part of a product of rows by panels of few bits."""

    _fields_ = (
        ("left", c_void_p),
        ("row_step", c_int64),
        ("depth_step", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("depth", c_int64),
        ("panels", c_void_p),
        ("bits", c_int32),
        ("scales", c_int32),
        ("group", c_int64),
        ("result", c_void_p),
        ("result_step", c_int64),
        ("scratch", c_void_p),
    )


PANELS = Header(
    constants={
        "X86_64": 1,
        "X86_64_V3": 3,
        "X86_64_V4": 4,
        "IN_PANELS": 0,
        "IN_ROWS": 1,
        "IN_COLUMNS": 2,
        "SYMMETRIC": 0,
        "AFFINE": 1,
        "WIDE": 2,
        "WIDE_AFFINE": 3,
    },
    functions={
        "panel_width": Signature(c_int64, (c_int32,)),
        "panels_scratch": Signature(c_int64, (c_int32,)),
        "multiply_panels": Signature(c_int32, (c_int32, POINTER(PanelProduct))),
        "quantized_scratch": Signature(c_int64, (c_int32, c_int64, c_int64, c_int64)),
        "multiply_quantized": Signature(c_int32, (c_int32, POINTER(QuantizedProduct))),
    },
    structures={"panel_product": PanelProduct, "quantized_product": QuantizedProduct},
)


# convolution.h


class Convolution(ctypes.Structure):
    """A convolution of images with channels last, by filters in panels."""

    _fields_ = (
        ("images", c_int64),
        ("channels", c_int64),
        ("out_channels", c_int64),
        ("groups", c_int64),
        ("in", c_int64 * 3),
        ("out", c_int64 * 3),
        ("kernel", c_int64 * 3),
        ("stride", c_int64 * 3),
        ("dilation", c_int64 * 3),
        ("pad", c_int64 * 3),
        ("x", c_void_p),
        ("filters", c_void_p),
        ("x_dtype", c_int32),
        ("filters_dtype", c_int32),
    )


class ConvolutionPart(ctypes.Structure):
    """A part of the result of a convolution."""

    _fields_ = (
        ("group", c_int64),
        ("pixel", c_int64),
        ("pixels", c_int64),
        ("channel", c_int64),
        ("channels", c_int64),
        ("result", c_void_p),
        ("result_step", c_int64),
        ("scratch", c_void_p),
    )


CONVOLUTION = Header(
    functions={
        "is_depthwise": Signature(c_int32, (POINTER(Convolution),)),
        "convolution_scratch": Signature(c_int64, (c_int32, POINTER(Convolution), c_int64)),
        "convolve": Signature(c_int32, (c_int32, POINTER(Convolution), POINTER(ConvolutionPart))),
    },
    structures={"convolution": Convolution, "convolution_part": ConvolutionPart},
)


# winograd.h


class WinogradPart(ctypes.Structure):
    """Some lines of tiles of a convolution."""

    _fields_ = (
        ("line", c_int64),
        ("lines", c_int64),
        ("matrices", c_void_p),
        ("step", c_int64),
        ("zeros", c_void_p),
        ("result", c_void_p),
        ("result_step", c_int64),
    )


WINOGRAD = Header(
    constants={"WINOGRAD_TILE": 2, "WINOGRAD_MATRICES": 16, "WINOGRAD_LEAST_CHANNELS": 16},
    functions={
        "winograd_read": Signature(c_int32, (c_int32, POINTER(Convolution), POINTER(WinogradPart))),
        "winograd_write": Signature(c_int32, (c_int32, POINTER(Convolution), POINTER(WinogradPart))),
    },
    structures={"winograd_part": WinogradPart},
)


# workspace.h

WORKSPACE = Header(functions={"workspace": Signature(c_void_p, (c_int64,))})


HEADERS: dict[str, Header] = {
    "collectives.h": COLLECTIVES,
    "convolution.h": CONVOLUTION,
    "cublas.h": CUBLAS,
    "indices.h": INDICES,
    "mapped_file.h": MAPPED_FILE,
    "nccl.h": NCCL,
    "overlap.h": OVERLAP,
    "panels.h": PANELS,
    "shared_memory.h": SHARED_MEMORY,
    "winograd.h": WINOGRAD,
    "workspace.h": WORKSPACE,
}
"""The table of each header in ``include/hidet_dist`` that declares functions of the library."""
