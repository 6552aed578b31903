from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hidet_dist.config import DistributedConfig
from hidet_dist.errors import ConfigError
from hidet_dist.machine import MACHINES, Cluster, builtin, load_machine, save_machine
from hidet_dist.spec import DeviceMesh

MESH = DeviceMesh((2, 8))


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for name in ("cpu", "dgx-a100-pod"):
        save_machine(builtin(name, MESH), path)
        assert load_machine(path, MESH) == builtin(name, MESH)
    # What auto_parallel is told takes the path as it takes a name.
    config = DistributedConfig.parse({"mesh_shape": [2, 8], "machine": str(path)})
    assert config.cluster == Cluster(config.mesh, builtin("dgx-a100-pod", MESH).links, MACHINES["dgx-a100"].device)


def test_a_machine_file_without_an_overlap_flag_describes_a_machine_without_overlap(
    tmp_path: Path,
) -> None:
    path = tmp_path / "machine.json"
    save_machine(builtin("dgx-a100-pod", MESH), path)
    assert load_machine(path, MESH).device.overlaps_communication
    data = json.loads(path.read_text())
    del data["device"]["overlaps_communication"]
    path.write_text(json.dumps(data))
    assert not load_machine(path, MESH).device.overlaps_communication


def test_a_file_with_measured_kernels_says_how_they_share_operators(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_machine(builtin("cpu", MESH), path)
    data = json.loads(path.read_text())
    del data["device"]["fusion"]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="has measured kernels, but no 'fusion'"):
        load_machine(path, MESH)
    data["device"]["kernels"] = {}
    path.write_text(json.dumps(data))
    assert load_machine(path, MESH).device.fusion == "gpu"


def test_one_link_serves_every_axis(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_machine(builtin("cpu", DeviceMesh((4,))), path)
    assert load_machine(path, MESH) == builtin("cpu", MESH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("device"), "must have the keys name"),
        (lambda data: data["device"].pop("memory_bytes"), "must have the keys name"),
        (
            lambda data: data["device"].update(memory_bytes="80 GB"),
            r"has an invalid figure: .* memory_bytes is '80 GB'",
        ),
        (lambda data: data["device"].update(flops_per_second={}), "'default' entry"),
        (lambda data: data["links"][0].update(bandwidth_bytes_per_second=-1), "bandwidth above 0"),
        (lambda data: data.update(links=data["links"] * 2), r"machine.json has 4 links, but the mesh .* has 2 axes"),
        (lambda data: data["links"][1].update(bandwidth_bytes_per_second=float("nan")), "bandwidth above 0 .* got nan"),
        (lambda data: data["links"][1].update(latency_seconds=None), "latency of 0 or more seconds; got None"),
        (lambda data: data["device"].update(flops_per_second=[1e9]), "'default' entry"),
        (lambda data: data.update(links=[]), "one for all"),
        (lambda data: data["device"].update(overlaps_communication=1), "true or false; got 1"),
        (lambda data: data["device"].update(fusion="tpu"), "fusion is one of hidet, library, gpu; got 'tpu'"),
        (lambda data: data["device"].update(overlaps=True), "must have the keys name"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "machine.json"
    save_machine(builtin("dgx-a100-pod", MESH), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        load_machine(path, MESH)


def test_a_missing_file_and_one_of_other_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the machine"):
        load_machine(tmp_path / "none.json", MESH)
    (tmp_path / "text.json").write_text("not JSON")
    with pytest.raises(ConfigError, match="Cannot read the machine"):
        load_machine(tmp_path / "text.json", MESH)


def test_a_file_may_leave_out_the_multiprocessors_of_a_gpu_that_is_known_by_its_name(tmp_path: Path) -> None:
    path, cluster = tmp_path / "machine.json", builtin("dgx-h100", DeviceMesh((2,)))
    save_machine(cluster, path)
    assert load_machine(path, cluster.mesh) == cluster
    data = json.loads(path.read_text())
    assert data["device"].pop("multiprocessors") == 132
    path.write_text(json.dumps(data))
    assert load_machine(path, cluster.mesh) == cluster
    path.write_text(json.dumps({**data, "device": data["device"] | {"name": "another GPU"}}))
    assert load_machine(path, cluster.mesh).device.multiprocessors == 0
    path.write_text(json.dumps({**data, "device": data["device"] | {"multiprocessors": 1.5}}))
    with pytest.raises(ConfigError, match=r"multiprocessors is a whole number of 0 or more; got 1\.5"):
        load_machine(path, cluster.mesh)
