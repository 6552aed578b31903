"""What kernels cost by class: the closed form, and the fit on samples whose truth is known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.calibration.fit import fit_kernel
from hidet_dist.errors import CalibrationError, ConfigError
from hidet_dist.machine import Cluster, Device, Link, load_machine, save_machine
from hidet_dist.machine.kernels import KernelCost, Work
from hidet_dist.spec import DeviceMesh

PLAIN = Device("toy", {"default": 1e9}, 1e8, 10**6, 1e-6, cache_bytes=1000)
KERNELS = {"matmul": KernelCost(1e-9, 2e-9, 3e-6), "copy": KernelCost(0.0, 1e-9), "function": KernelCost(5e-9, 0.0)}
DEVICE = replace(PLAIN, kernels={**KERNELS, "elementwise": KernelCost(0.0, 2e-8)})
UNKNOWN = ("seconds_per_operation", "seconds_per_byte", "seconds_per_call")


def test_operations_bytes_and_calls_add_up() -> None:
    assert DEVICE.kernel_seconds(Work("matmul", 100, 500, calls=2)) == pytest.approx(100e-9 + 500 * 2e-9 + 6e-6)
    # 1000 of the 3000 bytes are in the cache, a weight's never are: the others take 1e-8 s each.
    hot = DEVICE.kernel_seconds(Work("matmul", 0, 3000, calls=0))
    assert hot == pytest.approx(1000 * 2e-9 + 2000e-8)
    assert DEVICE.kernel_seconds(Work("matmul", 0, 800, 300, calls=0)) == pytest.approx(500 * 2e-9 + 300e-8)
    # A kernel that is slower than memory is no faster because of it.
    assert DEVICE.kernel_seconds(Work("elementwise", 0, 3000, calls=0)) == pytest.approx(3000 * 2e-8)
    assert DEVICE.kernel_seconds(Work("elementwise", 7, 0, calls=0, functions=10)) == pytest.approx(50e-9)


def test_classes_that_were_not_measured_have_no_cost() -> None:
    assert DEVICE.kernel_seconds(Work("pooling", 100, 100)) is None
    mesh = DeviceMesh((2,))
    links = (Link(1e-6, 1e9),)
    assert Cluster(mesh, links, PLAIN).copy_seconds(500) == pytest.approx(1e-6 + 1000e-8)
    assert Cluster(mesh, links, DEVICE).copy_seconds(500) == pytest.approx(1e-6 + 1000e-9)
    assert Cluster(mesh, links, DEVICE).copy_seconds(0) == 0
    with pytest.raises(ValueError, match="class of kernels 'fast'"):
        Work("fast", 1, 1)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-12, 1e-9), st.floats(1e-12, 1e-8), st.floats(1e-7, 1e-4))
def test_costs_come_back_from_their_own_times(operation: float, byte: float, call: float) -> None:
    truth = replace(PLAIN, kernels={"matmul": KernelCost(operation, byte, call)})
    works = [
        [Work("matmul", 10**7, 10**3)],
        [Work("matmul", 10**3, 900), Work("matmul", 10, 500, 400)],
        [Work("matmul", 10**2, 10, calls=50)],
        [Work("matmul", 10**5, 10**5)],
        [Work("matmul", 0, 10**6)],
    ]
    samples = [(own, sum(truth.kernel_seconds(one) or 0.0 for one in own)) for own in works]
    found = replace(PLAIN, kernels={"matmul": fit_kernel(PLAIN, "matmul", UNKNOWN, samples)})
    for own, seconds in samples:
        assert sum(found.kernel_seconds(one) or 0.0 for one in own) == pytest.approx(seconds, rel=1e-3)


def test_no_cost_is_negative() -> None:
    """Larger work that takes less time is noise: what is fitted is the nearest that makes sense."""
    falling = [([Work("copy", 0, size)], 1 / size) for size in (100, 200, 400)]
    found = fit_kernel(PLAIN, "copy", ("seconds_per_byte", "seconds_per_call"), falling)
    assert found.seconds_per_byte == 0
    assert found.seconds_per_call > 0
    with pytest.raises(CalibrationError, match="No costs above 0 fit the times of the copy kernels"):
        fit_kernel(PLAIN, "copy", ("seconds_per_operation",), falling)


def test_costs_come_back_from_a_file(tmp_path: Path) -> None:
    path, mesh = tmp_path / "machine.json", DeviceMesh((2,))
    cluster = Cluster(mesh, (Link(1e-6, 1e9),), DEVICE)
    save_machine(cluster, path)
    assert load_machine(path, mesh) == cluster
    data = json.loads(path.read_text())
    del data["device"]["kernels"], data["device"]["cache_bytes"]
    path.write_text(json.dumps(data))
    assert load_machine(path, mesh).device == replace(PLAIN, cache_bytes=0)


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ({"matmul": {"seconds_per_operation": 1.0}}, "the kernel 'matmul' of"),
        ({"matmul": dict.fromkeys(UNKNOWN, -1.0)}, "seconds_per_operation is a number of 0 or more; got -1.0"),
        ({"matmul": dict.fromkeys(UNKNOWN, "fast")}, "got 'fast'"),
        ({"warp": dict.fromkeys(UNKNOWN, 1.0)}, "got 'warp'"),
        ([1], "must map classes of kernels"),
    ],
)
def test_a_file_with_costs_that_make_no_sense_is_refused(tmp_path: Path, kernels: Any, says: str) -> None:
    path, mesh = tmp_path / "machine.json", DeviceMesh((2,))
    save_machine(Cluster(mesh, (Link(1e-6, 1e9),), DEVICE), path)
    data = json.loads(path.read_text())
    data["device"]["kernels"] = kernels
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_machine(path, mesh)
    with pytest.raises(ConfigError, match="cache_bytes of 0 or more; got -1"):
        replace(DEVICE, cache_bytes=-1)
