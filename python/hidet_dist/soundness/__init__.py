"""The soundness harness: every choice of every rule is run on random data and compared with the whole operator."""

from hidet_dist.soundness.check import Checked, Failure, check_operator, check_specs, random_inputs
from hidet_dist.soundness.oracle import NotEvaluable, OutOfRange, evaluate

__all__ = [
    "Checked",
    "Failure",
    "NotEvaluable",
    "OutOfRange",
    "check_operator",
    "check_specs",
    "evaluate",
    "random_inputs",
]
