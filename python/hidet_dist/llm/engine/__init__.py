"""Many requests over one model at once: pages of the pools, ragged steps, sampling, and streams of events."""

from __future__ import annotations

from hidet_dist.llm.engine.engine import Engine, EngineOptions, Statistics
from hidet_dist.llm.engine.request import Grammar, Request, Sampling
from hidet_dist.llm.engine.sampling import Scored
from hidet_dist.llm.engine.stream import Answer, Event, Stream

__all__ = [
    "Answer",
    "Engine",
    "EngineOptions",
    "Event",
    "Grammar",
    "Request",
    "Sampling",
    "Scored",
    "Statistics",
    "Stream",
]
