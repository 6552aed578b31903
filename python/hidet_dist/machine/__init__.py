"""The described machine: the figures of devices and links, and the closed forms of costs."""

from hidet_dist.machine.builtin import MACHINES, Machine, builtin
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.machine.file import load_machine, save_machine

__all__ = [
    "MACHINES",
    "Cluster",
    "Device",
    "Link",
    "Machine",
    "builtin",
    "load_machine",
    "save_machine",
]
