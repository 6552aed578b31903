"""Partition: from a graph and its plan to the sharded program, which is the same for every rank."""

from hidet_dist.partitioning.collective_op import CollectiveOp
from hidet_dist.partitioning.operators import CommunicationOp, WaitOp
from hidet_dist.partitioning.program import Program, partition_graph
from hidet_dist.partitioning.stages import stage_graphs

__all__ = ["CollectiveOp", "CommunicationOp", "Program", "WaitOp", "partition_graph", "stage_graphs"]
