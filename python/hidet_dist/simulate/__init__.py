"""The simulator: all ranks of any mesh stepped in one process, collectives in NumPy. For tests and checking plans."""

from hidet_dist.simulate.pipeline import simulate_pipeline
from hidet_dist.simulate.simulator import simulate

__all__ = ["simulate", "simulate_pipeline"]
