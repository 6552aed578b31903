"""hidet 0.6.1 replaces infinite constants by the greatest number of the dtype; this is corrected here.

A mask of ``-inf`` would not mask a row that is masked completely, and comparisons with ``inf`` would fail. hidet cannot
write infinity and NaN in C++ either: it writes ``-inff``, which is not a literal.
"""

from __future__ import annotations

import math
from typing import Any

from hidet.backend.codegen import Codegen
from hidet.ir.dtypes.floats import FloatType
from hidet.ir.expr import Constant, constant
from hidet.utils.doc import Text

hidet_constant = FloatType.constant
hidet_literal = Codegen.scalar_literal


def _constant(self: Any, value: Any) -> Constant:
    number = float(value.value if isinstance(value, Constant) else value)
    return hidet_constant(self, value) if math.isfinite(number) else constant(number, self)


def _literal(self: Any, value: Any, dtype: Any) -> Any:
    if not isinstance(dtype, FloatType) or math.isfinite(value):
        return hidet_literal(self, value, dtype)
    number = "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "(-INFINITY)"
    return Text(str(hidet_literal(self, 0.0, dtype)).replace("0.0f", number).replace("0.0", number))


def install() -> None:
    """Keep infinite constants, and write them as valid C++, from now on."""
    FloatType.constant = _constant
    Codegen.scalar_literal = _literal
