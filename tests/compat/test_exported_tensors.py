"""Programs of hidet's tensors, which torch shares, at the end of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
import sys

import hidet
import numpy as np

from hidet.graph.impl.dlpack import DLManagedTensorContext

import hidet_dist
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

if sys.argv[1] == "uncorrected":
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(DLManagedTensorContext.allocated))
graph = normalize(hidet.trace_from(hidet.symbol([8, 16]) @ hidet.asarray(np.ones((16, 16), "float32"))))
plan = search(graph, builtin("cpu", DeviceMesh((2,))), pins={"w0": "(R, S0)"})
program = partition_graph(graph, plan.stages[0])
data = [program.data_of(rank) for rank in range(2)]
"""


@pytest.mark.slow
def test_hidet_still_crashes_at_the_end_of_a_process_unless_its_list_of_exports_is_kept() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", SCRIPT, kind]) for kind in ("corrected", "uncorrected")]
    corrected, uncorrected = (process.wait(300) for process in processes)
    assert corrected == 0
    assert uncorrected < 0, "hidet no longer crashes: drop compat/exported_tensors.py"
