"""Calibration: measuring the running machine, with the processes, transports and kernels that serve on it."""

from hidet_dist.calibration.measuring import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
