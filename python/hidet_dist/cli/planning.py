"""``hidet-dist plan`` and ``hidet-dist build``: a model planned, or built, for a described machine."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hidet_dist.cli.quantities import parse_bytes, parse_mesh
from hidet_dist.cli.summary import show, summarize
from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.progress import report_console
from hidet_dist.report.data import SUFFIX, Report


@dataclass(frozen=True)
class Job:
    """What is planned, and for what: the options that ``plan`` and ``build`` share, as they were written."""

    model: Path
    mesh: str
    machine: str | None = None
    dtype: str | None = None
    budget: str | None = None
    batch: int = 1
    seq: int = 128
    time_limit: float | None = None

    def configurations(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The distributed and the optimization configuration. Raises ConfigError before the model is looked at."""
        distributed: dict[str, Any] = {"mesh_shape": parse_mesh(self.mesh)}
        if self.machine is not None:
            distributed["machine"] = self.machine
        optimization: dict[str, Any] = {}
        if self.budget is not None:
            optimization["mem_budget"] = parse_bytes(self.budget)
        if self.time_limit is not None:
            optimization["solver_time_limit_seconds"] = self.time_limit
        _check(distributed, optimization)
        if self.batch < 1 or self.seq < 1:
            raise ConfigError(f"--batch and --seq are 1 or more; got {self.batch} and {self.seq}.")
        return distributed, optimization

    def origin(self) -> dict[str, str]:
        """The options as text, for a report to hold."""
        return {name: str(value) for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_origin(cls, origin: Mapping[str, str]) -> Job:
        """The inverse of :meth:`origin`. Raises ConfigError for anything else."""
        kinds = {"model": Path, "batch": int, "seq": int, "time_limit": float}
        try:
            return cls(**{name: kinds.get(name, str)(value) for name, value in origin.items()})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "The report does not say how its plan was made; --live takes plans of `hidet-dist plan --out`."
            ) from error

    @property
    def title(self) -> str:
        """What the model is called: the name of its folder or file."""
        path = self.model.parent if self.model.name == "config.json" else self.model
        return path.resolve().name

    def graph(self, weights: str | None) -> Any:
        """The model as a graph; ``weights`` as :func:`hidet_dist.frontends.load.load_model` takes it."""
        from hidet_dist.frontends.load import load_model

        quiet()
        return load_model(self.model, dtype=self.dtype, batch=self.batch, seq=self.seq, weights=weights)


def quiet() -> None:
    """Leave warnings of libraries out of the output; errors are errors."""
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b.*")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _check(distributed: Mapping[str, Any], optimization: Mapping[str, Any]) -> None:
    from hidet_dist.config import DistributedConfig, OptimizationConfig

    parsed = OptimizationConfig.parse(optimization)
    DistributedConfig.parse(distributed, parsed.default_machine)


def plan(job: Job, out: Path | None, html: Path | None, as_json: bool) -> None:
    """Plan a model, print the summary, and write the plan with its report, or the page, where asked for."""
    from hidet_dist.api import describe, make_plan

    distributed, optimization = job.configurations()
    graph = job.graph(None)
    found = make_plan(graph, distributed, optimization)
    report = replace(describe(found, graph, distributed, optimization, job.title), origin=job.origin())
    if out is not None:
        report.save(out.with_name(out.name.removesuffix(".json") + SUFFIX))
        found.save(out)
    if html is not None:
        _write_page(report, html)
    _print(report, as_json)


def build(job: Job, out: Path, random_weights: bool, as_json: bool) -> None:
    """Plan and compile a model for this machine's processors, and write artifacts."""
    from hidet_dist.api import auto_parallel

    distributed, optimization = job.configurations()
    graph = job.graph("random" if random_weights else "files")
    auto_parallel(graph, distributed, optimization, out)
    _print(Report.load(out), as_json)
    if not as_json:
        print(f"Written to {out}: `hidet-dist run {out}` runs it.")


def serve(report: Report) -> None:
    """Serve a report until the user ends it; the model is read again, to search plans with other pins."""
    from hidet_dist.api import describe, make_plan
    from hidet_dist.report.live import serving

    job = Job.of_origin(report.origin)
    distributed, optimization = job.configurations()
    graph = job.graph(None)

    def search(pins: Mapping[str, str]) -> Report:
        pinned = {**optimization, "pins": dict(pins)}
        found = make_plan(graph, distributed, pinned)
        return replace(describe(found, graph, distributed, pinned, job.title), origin=report.origin)

    if search({}).fingerprint != report.fingerprint:
        raise PlanError(f"{job.model} is another model than the plan was made for; plan it anew.")
    with serving(report, search) as address:
        print(f"Serving at {address} until Ctrl-C.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _write_page(report: Report, html: Path) -> None:
    from hidet_dist.files import write_text
    from hidet_dist.report import render

    write_text(html, render(report))


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summarize(report), indent=1))
    else:
        show(report, report_console())
