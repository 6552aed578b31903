"""The simulator: it runs all ranks of any mesh in one process, collectives in NumPy, for tests and checks of plans."""

from hidet_dist.simulate.pipeline import simulate_pipeline
from hidet_dist.simulate.simulator import assemble, simulate, split

__all__ = ["assemble", "simulate", "simulate_pipeline", "split"]
