"""hidet 0.6.1 cannot build tasks that call isnan, isinf or isfinite; this is corrected here.

* It pickles tasks to build several in parallel, and the types of these functions hold a lambda.
* It writes isinf of double precision as ``isin``.
"""

from __future__ import annotations

from typing import Any

from hidet.ir.dtypes import boolean
from hidet.ir.primitives.func import lookup_primitive_function
from hidet.ir.type import DataType

FUNCTIONS = ("isnan", "isinf", "isfinite")


def _type_of(name: str) -> Any:
    return lookup_primitive_function(f"generic_{name}").func_type


hidet_result_types = {name: _type_of(name).type_infer_func for name in FUNCTIONS}


def _boolean(_: Any) -> DataType:
    return boolean


def install() -> None:
    """Give the functions a type that can be pickled, and their name, from now on."""
    for target in ("cpu", "cuda"):
        lookup_primitive_function(f"{target}_f64_isinf").codegen_name = "isinf"
    for name in FUNCTIONS:
        _type_of(name).type_infer_func = _boolean
