"""Partition: from a graph and its plan to the sharded program, one and the same for every rank."""

from hidet_dist.partitioning.operators import CommunicationOp, WaitOp
from hidet_dist.partitioning.program import Program, partition_graph

__all__ = ["CommunicationOp", "Program", "WaitOp", "partition_graph"]
