"""A rank of a model that several ranks step: rank 0 has the engine. It prints what it computed as a line of JSON.

The first argument names what happens: ``refuse``, ``fail`` or ``die``, on the rank of the second one; or ``idle``: no
request comes for longer than the ranks' time-out.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import numpy as np
from tests.llm.models import History, Letters, sizes_for

from hidet_dist.errors import CallError, HidetDistError
from hidet_dist.llm.engine import Engine, Request, Sampling
from hidet_dist.llm.ranks import LeadingModel, follow
from hidet_dist.llm.step import StepInputs
from hidet_dist.runtime import session


class Failing(History):
    """A model that fails at its sixth step, on one rank or on all."""

    def step(self, inputs: StepInputs) -> np.ndarray:
        what, where = sys.argv[1], sys.argv[2]
        if len(self.steps) == 5 and where in {"all", os.environ["RANK"]}:
            if what == "refuse":
                self.steps.append(inputs)
                raise CallError("no memory")
            if what == "fail":
                raise RuntimeError("broken")
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(inputs)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    idle = sys.argv[1] == "idle"
    if idle:
        session.init(timeout_seconds=2)
    letters = Letters()
    model = Failing(sizes_for(letters))
    told: dict = {"rank": rank, "error": "", "answers": [], "later": []}
    try:
        if rank:
            follow(model, world_size)
        else:
            request = Request((7, 8, 9), max_tokens=8, choices=2, ignore_end=True, sampling=Sampling(seed=3))
            with Engine(LeadingModel(model, world_size), letters) as engine:
                time.sleep(5 if idle else 0)
                try:
                    told["answers"] = [answer.ids for answer in engine.submit(request).answers()]
                finally:
                    if engine.failure is None:
                        told["later"] = [answer.ids for answer in engine.submit(request).answers()]
    except HidetDistError as error:
        told["error"] = f"{error}"
    told["pool"] = hashlib.sha256(model.pool.tobytes()).hexdigest()
    told["steps"] = len(model.steps)
    told["closed"] = model.closed
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
