"""The simulator: all ranks of any mesh stepped in one process, collectives in NumPy. For tests and checking plans."""

from hidet_dist.simulate.pipeline import simulate_pipeline
from hidet_dist.simulate.simulator import assemble, simulate, split

__all__ = ["assemble", "simulate", "simulate_pipeline", "split"]
