"""The solver HiGHS: a model that is silent, and an option of its presolve that is known to be wrong."""

from __future__ import annotations

import highspy

RIGHT_PRESOLVE = 1 << 12
"""A ``presolve_rule_off`` for integer programs. HiGHS 1.15.1 aggregates columns wrongly: it finds some programs
infeasible that are not, and takes some solutions for the best ones that are not."""


def new_model(**settings: bool | int | float) -> highspy.Highs:
    """Make a model without output, with some of HiGHS's options."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    for name, value in settings.items():
        model.setOptionValue(name, value)
    return model
