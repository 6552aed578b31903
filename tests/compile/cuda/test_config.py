"""The values of the target's keys, valid and invalid."""

import hidet
import pytest

from hidet_dist import auto_parallel
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.config import DistributedConfig, OptimizationConfig
from hidet_dist.errors import ConfigError
from hidet_dist.machine import MACHINES, builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.spec import DeviceMesh
from hidet_dist.targets import TARGETS


def target(machine=None, **keys):
    config = OptimizationConfig.parse({"target": "cuda", **keys})
    where = {"mesh_shape": [2]} if machine is None else {"mesh_shape": [2], "machine": machine}
    return config.target_on(DistributedConfig.parse(where, config.default_machine).cluster.device)


@pytest.mark.parametrize(("arch", "name"), [("sm_80", "A100-SXM4-80GB"), ("sm_90", "H100-SXM5-80GB")])
def test_an_architecture_alone_stands_for_a_machine(arch, name):
    assert target(arch=arch) == CudaTarget(GPUS[name], cublas=None)
    assert target(arch=arch).arch == arch


@pytest.mark.parametrize("auto", [{}, {"arch": "auto"}])
@pytest.mark.parametrize(
    ("machine", "arch"), [("dgx-a100", "sm_80"), ("hgx-h200-pod", "sm_90"), ("pcie-l40s", "sm_89")]
)
def test_auto_is_the_architecture_of_the_described_machine(auto, machine, arch):
    assert target(machine, **auto).arch == arch


def test_all_gpus_that_can_be_planned_for_can_be_built_for():
    devices = {machine.device.name for name, machine in MACHINES.items() if name != "cpu"}
    assert devices == set(GPUS)
    for arch, machine in TARGETS["cuda"].machines.items():
        assert GPUS[MACHINES[machine].device.name].arch == arch


def test_options_reach_the_target():
    assert target("dgx-h100", cuda={"space": 2, "mma": "mma"}) == CudaTarget(
        GPUS["H100-SXM5-80GB"], 2, "mma", cublas=None
    )
    assert OptimizationConfig.parse({}).target_on(builtin("cpu", DeviceMesh((2,))).device) == CpuTarget()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target": "tpu"}, "'target'\\] must be one of cpu, cuda; got 'tpu'"),
        ({"target": "cuda", "arch": "sm_70"}, "'arch'\\] must be one of auto, sm_80.*got 'sm_70'"),
        ({"target": "cuda", "arch": 90}, "'arch'\\] must be one of"),
        ({"target": "cuda", "cuda": {"space": 3}}, "'space'\\] must be one of 0, 1, 2; got 3"),
        ({"target": "cuda", "cuda": {"space": True}}, "'space'\\] must be one of"),
        ({"target": "cuda", "cuda": {"mma": "wgmma"}}, "'mma'\\] must be one of mma, simt"),
        ({"arch": "sm_80"}, "is for the target 'cuda'; the target is 'cpu'"),
        ({"precision": "float16"}, "is for the target 'cuda'; the target is 'cpu'"),
        ({"cuda": {"cuda_graph": True}}, "has options of the target 'cuda'; the target is 'cpu'"),
        ({"target": "cuda", "space": 1}, "'space'\\] is an option of the target 'cuda': give it in a dict"),
        ({"target": "cuda", "cuda": {"arch": "sm_90"}}, "Unknown key 'arch' in optimization_config\\['cuda'\\]"),
        ({"target": "cuda", "cuda": 1}, "optimization_config\\['cuda'\\] must be a dict; got 1"),
        ({"target": "cuda", "cuda": {"cuda_graph": 1}}, "'cuda_graph'\\] must be True or False; got 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        OptimizationConfig.parse(keys)


def test_a_machine_without_gpus_is_refused_before_work_starts(tmp_path):
    x = hidet.symbol([2, 4], "float32", "cpu")
    graph = hidet.trace_from(x + 1.0, [x])
    with pytest.raises(ConfigError, match="needs a machine with GPUs, but the machine's device is 'cpu'"):
        auto_parallel(graph, {"mesh_shape": [2]}, {"target": "cuda"}, tmp_path / "out")
    with pytest.raises(ConfigError, match="'sm_80', but the machine's device H100-SXM5-80GB is sm_90"):
        auto_parallel(
            graph,
            {"mesh_shape": [2], "machine": "dgx-h100"},
            {"target": "cuda", "arch": "sm_80"},
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
