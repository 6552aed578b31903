"""Calibration: measurement of the running machine with the processes, transports and kernels of serving."""

from hidet_dist.calibration.measuring import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
