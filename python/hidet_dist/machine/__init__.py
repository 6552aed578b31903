"""The described machine: what the cost model knows, and the closed forms of its costs."""

from hidet_dist.machine.builtin import MACHINES, Machine, builtin
from hidet_dist.machine.calibration import Calibration, calibrate
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.machine.file import load_machine, save_machine

__all__ = [
    "MACHINES",
    "Calibration",
    "Cluster",
    "Device",
    "Link",
    "Machine",
    "builtin",
    "calibrate",
    "load_machine",
    "save_machine",
]
