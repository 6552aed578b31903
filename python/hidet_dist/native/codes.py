"""The integer codes of dtypes, reduce operations and statuses in the C interface."""

from __future__ import annotations

from collections.abc import Iterable

from hidet_dist.native.signatures import COLLECTIVES, NCCL

DTYPE_CODES: dict[str, int] = {
    "float32": COLLECTIVES.constants["F32"],
    "float64": COLLECTIVES.constants["F64"],
    "float16": COLLECTIVES.constants["F16"],
    "bfloat16": COLLECTIVES.constants["BF16"],
    "int8": COLLECTIVES.constants["I8"],
    "int32": COLLECTIVES.constants["I32"],
    "int64": COLLECTIVES.constants["I64"],
    "uint8": COLLECTIVES.constants["U8"],
    "bool": COLLECTIVES.constants["BOOL"],
}
"""The code of each dtype that collectives support, by its name in hidet and NumPy."""

REDUCE_OP_CODES: dict[str, int] = {
    name: COLLECTIVES.constants[name.upper()] for name in ("sum", "max", "min", "product", "mean")
}
"""The code of each reduce operation, by name."""

NOBODY = COLLECTIVES.constants["NOBODY"]
"""The code for no rank in a send or receive."""

OK = COLLECTIVES.constants["OK"]
NO_COMMUNICATOR = COLLECTIVES.constants["NO_COMMUNICATOR"]
INVALID_ARGUMENT = COLLECTIVES.constants["INVALID_ARGUMENT"]
FAILED = COLLECTIVES.constants["FAILED"]
IN_PROGRESS = NCCL.constants["NCCL_IN_PROGRESS"]


def dtype_code(name: str) -> int:
    """Return the native code of a dtype, given its name in hidet or NumPy. Raises ``ValueError`` where it has none."""
    try:
        return DTYPE_CODES[name]
    except KeyError:
        raise ValueError(f"collectives do not support dtype {name!r}, only {', '.join(DTYPE_CODES)}") from None


def group_code(mesh_axes: Iterable[int]) -> int:
    """Return the native code of the group of ranks that differ only along these mesh axes: a bit for each axis."""
    return sum(1 << axis for axis in mesh_axes)


def reduce_op_code(name: str) -> int:
    """Return the native code of one of ``REDUCE_OP_CODES``. Raises ``ValueError`` for any other name."""
    try:
        return REDUCE_OP_CODES[name]
    except KeyError:
        raise ValueError(f"no reduce operation {name!r}, only {', '.join(REDUCE_OP_CODES)}") from None
