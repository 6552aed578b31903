"""``hidet-dist report --live``: a plan's page, served on this machine, that searches again with pins."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from dataclasses import replace

from hidet_dist.cli.request import PlanRequest
from hidet_dist.errors import PlanError
from hidet_dist.report import Report


def serve(report: Report) -> None:
    """Serve a report until the user interrupts it. The model is traced again, to search plans with other pins.

    Raises
    ------
    ConfigError, PlanError
        When the report does not name its model, or the model has changed since.
    KeyboardInterrupt
        When the user interrupts it; a search has ended then.
    """
    request = PlanRequest.of_origin(report.origin)
    request.check()

    from hidet_dist.cli.planning import trace
    from hidet_dist.phases import Traced
    from hidet_dist.report.live import serving
    from hidet_dist.search.limits import Clock

    prepared = Traced.of(trace(request, None), *request.configurations()).prepare()
    if prepared.fingerprint != report.fingerprint:
        raise PlanError(f"{request.model} has changed since the plan was made; plan it again.")
    prepared.plan()  # derives the rules, so that the first search with pins is as fast as the others
    # The graph, the rules and the libraries stay: the garbage collector need not walk them after every search.
    gc.collect()
    gc.freeze()

    def search(pins: Mapping[str, str], clock: Clock) -> Report:
        planned = prepared.with_pins(pins).plan(clock=clock)
        return replace(planned.reports(request.title)[0], origin=report.origin)

    with serving(report, search) as address:
        print(f"Serving at {address} until Ctrl-C.", flush=True)
        threading.Event().wait()
