"""The table of targets: a third target needs its folder and its entry, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.compile import backend_of
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError
from hidet_dist.machine import MACHINES
from hidet_dist.targets import DEFAULT_TARGET, KINDS_OF_MEMORY, TARGETS, Target

X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    target = Target(
        "fake",
        memory="cpu",
        backend="tests.targets.fake.target:FakeTarget",
        device="hidet_dist.runtime.device:HOST",
        transport="hidet_dist.runtime.transports.choose:open_for_host",
        machine="pcie-l40s",
        machines={"fake-1": "dgx-a100"},
        computes_constants=True,
        keeps_nan=True,
    )
    monkeypatch.setitem(TARGETS, target.name, target)
    yield target


@pytest.mark.parametrize("name", TARGETS)
def test_an_entry_names_what_its_layers_import(name: str) -> None:
    """What serving processes import is not in the compiler, and the machines are known."""
    target = TARGETS[name]
    assert (target.name, backend_of(name).record) == (name, target)
    assert target.backend.startswith("hidet_dist.compile.")
    for reference in (target.device, target.transport):
        assert reference.startswith("hidet_dist.runtime.")
        assert resolve_name(reference)
    assert target.memory in KINDS_OF_MEMORY
    assert {target.machine, *target.machines.values()} <= set(MACHINES)
    assert set(target.machines) <= set(backend_of(name).archs)


def graph() -> hidet.graph.FlowGraph:
    x = hidet.symbol([4, 8], "float32", "cpu")
    return hidet.trace_from(ops.relu(x - 9.0) * 2.0, [x])


@pytest.mark.usefixtures("fake")
def test_a_third_target_is_planned_for_its_machine() -> None:
    for given, machine in (({}, "pcie-l40s"), ({"arch": "fake-1"}, "dgx-a100")):
        config = OptimizationConfig.parse({"target": "fake", **given})
        cluster = DistributedConfig.parse({"mesh_shape": [2]}, config.default_machine).cluster
        assert cluster.device == MACHINES[machine].device
    seconds = {
        name: hidet_dist.make_plan(graph(), {"mesh_shape": [2]}, {"target": name}).makespan_seconds
        for name in ("fake", DEFAULT_TARGET)
    }
    on_gpus = hidet_dist.make_plan(graph(), {"mesh_shape": [2], "machine": "pcie-l40s"}).makespan_seconds
    assert seconds["fake"] == on_gpus != seconds[DEFAULT_TARGET]


@pytest.mark.usefixtures("fake")
def test_a_third_target_is_built_and_served(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    config = {"target": "fake", "fake": {"instructions": "x86-64"}}
    hidet_dist.auto_parallel(graph(), {"mesh_shape": [1]}, config, folder)
    manifest = Manifest.load(folder)
    assert (manifest.target, manifest.arch, manifest.gpu) == ("fake", "x86-64", None)
    try:
        np.testing.assert_array_equal(hidet_dist.load_partition(folder, 0)(X), 2 * np.maximum(X - 9, 0))
    finally:
        hidet_dist.shutdown()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("distributed", "config", "says"),
    [
        ({}, {"target": "tpu"}, "must be one of cpu, cuda, fake; got 'tpu'"),
        ({}, {"target": "fake", "fake": {"instructions": 3}}, r"\['fake'\]\['instructions'\] must be one of x86-64"),
        ({}, {"target": "fake", "fake": {"space": 1}}, r"Unknown key 'space' in optimization_config\['fake'\]"),
        ({}, {"instructions": "x86-64"}, "is an option of the target 'fake'"),
        ({}, {"fake": {}}, "has options of the target 'fake'; the target is 'cpu'"),
        ({}, {"arch": "fake-1"}, "is for the target 'fake'; the target is 'cpu'"),
        ({}, {"target": "fake", "precision": "float16"}, "is for the target 'cuda'; the target is 'fake'"),
        ({"shares": "auto"}, {"target": "fake"}, "not supported on the target 'fake'"),
        ({}, {"target": "fake", "objective": "latency", "symbols": {"n": 4}}, "target 'cpu', not for 'fake'"),
    ],
)
def test_what_a_third_target_has_no_capability_for_is_refused(
    distributed: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        hidet_dist.make_plan(graph(), {"mesh_shape": [2], **distributed}, config)
