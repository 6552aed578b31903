"""Checks of what a user asks for, across the two configurations and a given plan, before work starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet_dist.compile import Backend
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.options.option import default_of, options_of
from hidet_dist.spec import Plan
from hidet_dist.spec.symbols import SymbolPlan
from hidet_dist.targets import TARGETS, targets_with


def check_configurations(distributed: DistributedConfig, optimization: OptimizationConfig, target: Backend) -> None:
    """Refuse configurations that do not fit each other. Raises ConfigError."""
    precision, known = optimization.weights.precision, target.record.stored_precisions
    if precision is not None and precision.name not in known:
        others = ", ".join(name for name, one in TARGETS.items() if precision.name in one.stored_precisions)
        raise ConfigError(
            f"optimization_config['weights'] has the precision {precision.name!r}, which is for the target {others!r}, "
            f"not for {target.record.name!r}; that has {' and '.join(known) or 'none'}."
        )
    given = optimization.given_stages or ()
    if given and distributed.mesh.is_uneven():
        raise ConfigError(
            "The stages are given whole, each with a mesh of its own: give 'shares' in each of "
            "optimization_config['stages'] instead of distributed_config['shares']."
        )
    uneven = any(stage.mesh.is_uneven() or stage.searches_shares for stage in given)
    if uneven or distributed.mesh.is_uneven() or distributed.searches_shares:
        _check_shares(target)


def check_plan(plan: Any, target: Backend, optimization: OptimizationConfig, symbols: Sequence[SymbolPlan]) -> None:
    """Refuse a given plan that contradicts the configuration. Raises ConfigError or PlanError."""
    if not isinstance(plan, Plan):
        raise PlanError(f"auto_parallel takes a Plan (see Plan.load) as plan; got a {type(plan).__name__}.")
    plan.check_pipeline()
    for key, one in options_of(optimization).items():
        if one.by_plan and getattr(optimization, key) != default_of(optimization, key):
            raise ConfigError(
                f"optimization_config[{key!r}] is for the search, which a given plan replaces: leave one of the two "
                "out."
            )
    if plan.pipeline is not None and not target.record.symbolic_pipelines and plan.stages[0].symbols:
        raise ConfigError(
            f"Pipelines of graphs with symbolic dims are so far for the target {targets_with('symbolic_pipelines')!r}, "
            f"not for {target.record.name!r}: give a plan of one stage, or of the graph traced for one size."
        )
    for stage in plan.stages:
        if stage.mesh.is_uneven() or not stage.has_equal_shards:
            _check_shares(target)
    declared = {symbol.name: symbol for symbol in symbols}
    count = 1 if plan.pipeline is None else plan.pipeline.micro_batches
    for symbol in (symbol for stage in plan.stages for symbol in stage.symbols):
        whole = declared.setdefault(symbol.name, symbol)
        if symbol not in (whole, whole.cut(count)):  # a pipeline's symbols are those of one micro-batch
            raise PlanError(
                f"The plan is for the symbolic dim {symbol.name} of size {symbol.size}, a multiple of "
                f"{symbol.multiple_of}; optimization_config['symbols'] declares another."
            )


def _check_shares(target: Backend) -> None:
    """Refuse shares of mesh axes, or other unequal parts, where they are not offered. Raises ConfigError."""
    if not target.record.unequal_parts:
        raise ConfigError(
            f"Shares of mesh axes are not supported on the target {target.record.name!r}: leave 'shares' out of "
            "distributed_config and of its stages, and unequal parts out of a given plan."
        )
