"""Invalid input is refused before any work, such as the derivation of rules, by both calls that plan."""

from __future__ import annotations

import json

import hidet
import pytest

import hidet_dist  # noqa: F401
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, TensorShardSpec


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deriving a rule is work."""

    def fail(self, op):
        raise AssertionError("work was begun")

    monkeypatch.setattr(RuleTable, "__call__", fail)


def spec(text: str) -> TensorShardSpec:
    return TensorShardSpec.parse(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mem_budget": 0}, "above 0; got 0"),
        ({"mem_budget": -5}, "above 0; got -5"),
        ({"mem_budget": 0.5}, "got 0.5"),
        ({"mode": "guess"}, "mode must be one of search, propagate; got 'guess'"),
        ({"input_specs": [spec("(S0, R, R)")]}, "spec of input 0 does not fit"),
        ({"input_specs": [spec("(R, S2)")]}, "mesh axis 2"),
        ({"output_specs": [None, None]}, "1 outputs but 2"),
        ({"pins": {"w0": "(S4, R)"}}, "mesh axis 4"),
        ({"pins": {"w0": "(S0, R)", "x0": "(R)"}}, "1 dims"),
        ({"pins": {"op:0": "(S0, R) -> (S0, R)"}}, "2 and 1"),
        ({"pins": ["w0"]}, "must map names to specs"),
        ({"names": ["w0"]}, "a hidet Module"),
    ],
)
def test_searches_refuse(mlp, toy, arguments, says) -> None:
    with pytest.raises(ConfigError, match=says):
        search(mlp, toy((2,)), **arguments)


@pytest.mark.parametrize(
    ("distributed", "optimization", "says"),
    [
        ({"mesh_shape": [2]}, {"mem_budget": 0}, "above 0; got 0"),
        ({"mesh_shape": [2]}, {"mode": "guess"}, "'guess'"),
        ({"mesh_shape": [2]}, {"pins": {"w0": "(S0)(R)"}}, r"optimization_config\['pins'\]\['w0'\]"),
        ({"mesh_shape": [2]}, {"pins": {"w0": 7}}, r"optimization_config\['pins'\]\['w0'\] must be a tensor's spec"),
        ({"mesh_shape": [2]}, {"pins": {"w7": "(R, R)"}}, "nothing called 'w7'"),
        ({"mesh_shape": [2]}, {"names": 7}, "a hidet Module"),
        ({"mesh_shape": [2]}, {"input_specs": ["(S1, R)"]}, "spec of input 0 does not fit"),
        ({"mesh_shape": [2, 2]}, {"output_specs": ["(S01, S1)"]}, "only once"),
    ],
)
def test_builds_refuse_and_write_nothing(mlp, distributed, optimization, says, tmp_path) -> None:
    with pytest.raises(ConfigError, match=says):
        hidet.distributed.auto_parallel(mlp, distributed, optimization, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_meshes_and_machines_must_match(mlp, toy, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"mesh \[axis0=4\] but .* \[axis0=2\]"):
        hidet.distributed.auto_parallel(mlp, {"mesh_shape": [2], "machine": toy((4,))}, {}, tmp_path / "out")
    with pytest.raises(ConfigError, match="2 axes; got 1 links"):
        Cluster(DeviceMesh((2, 2)), (Link(0.0, 1.0),), Device("d", {"default": 1.0}, 1.0, 1, 0.0))


@pytest.mark.parametrize("bandwidth", [-1.0, 0.0, float("nan")])
def test_bandwidths_are_above_zero(mlp, tmp_path, bandwidth: float) -> None:
    with pytest.raises(ConfigError, match="bandwidth"):
        Link(1e-6, bandwidth)
    with pytest.raises(ConfigError, match="above"):
        Device("d", {"default": 1.0}, bandwidth, 1, 0.0)
    device = {
        "name": "d",
        "flops_per_second": {"default": 1.0},
        "memory_bandwidth_bytes_per_second": 1.0,
        "memory_bytes": 1,
        "launch_seconds": 0.0,
    }
    links = [{"latency_seconds": 0.0, "bandwidth_bytes_per_second": bandwidth}]
    (tmp_path / "machine.json").write_text(json.dumps({"device": device, "links": links}))
    with pytest.raises(ConfigError, match="bandwidth"):
        hidet.distributed.auto_parallel(
            mlp, {"mesh_shape": [2], "machine": str(tmp_path / "machine.json")}, {}, tmp_path / "out"
        )
