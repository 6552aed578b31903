"""Described machines: the figures of devices and links, and the predicted seconds of operators and collectives."""

from hidet_dist.machine.builtin import MACHINES, Machine, builtin
from hidet_dist.machine.cluster import FUSIONS, GPU, HIDET, LIBRARY, Cluster, Device, DeviceGroup, Link
from hidet_dist.machine.file import load_machine, save_machine
from hidet_dist.machine.groups import unequal_cluster
from hidet_dist.machine.protocols import Protocol

__all__ = [
    "FUSIONS",
    "GPU",
    "HIDET",
    "LIBRARY",
    "MACHINES",
    "Cluster",
    "Device",
    "DeviceGroup",
    "Link",
    "Machine",
    "Protocol",
    "builtin",
    "load_machine",
    "save_machine",
    "unequal_cluster",
]
