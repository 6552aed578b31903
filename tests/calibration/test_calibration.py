"""Calibrating with real processes, and the fit of links on samples whose truth is known."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hidet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)
from hidet_dist.calibration import calibrate, kernels
from hidet_dist.calibration.fit import cache_bytes, fit_link, predicted_seconds
from hidet_dist.calibration.kernels import KERNEL_PROBES
from hidet_dist.calibration.measuring import DTYPES
from hidet_dist.calibration.probes import probes
from hidet_dist.calibration.samples import PASS_BYTES, CollectiveSample
from hidet_dist.cli.app import app
from hidet_dist.compile import optimize_program
from hidet_dist.config import DistributedConfig
from hidet_dist.errors import CalibrationError, ConfigError, SpecError
from hidet_dist.machine import Cluster, Device, Link, builtin, load_machine
from hidet_dist.machine.kernels import KERNEL_CLASSES
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import COMMUNICATING

DEVICE = Device("toy", {"default": 1e9}, 1e9, 10**9, 1e-6)
SIZES = (2**10, 2**16, 2**22)


def samples(mesh: DeviceMesh, link: Link, axis: int, noise: Any = lambda _: 1.0) -> list[CollectiveSample]:
    cluster = Cluster(mesh, (link,) * mesh.ndim, DEVICE)
    found = []
    for kind in COMMUNICATING:
        for number, size in enumerate(4**e for e in range(4, 13)):
            sample = CollectiveSample(kind, (axis,), size, 0.0)
            seconds = predicted_seconds(cluster, sample) * noise(number)
            found.append(CollectiveSample(kind, (axis,), size, seconds))
    return found


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12), st.sampled_from([(2,), (8,), (2, 4)]))
def test_a_link_comes_back_from_its_own_times(latency: float, bandwidth: float, shape: tuple[int, ...]) -> None:
    mesh, link = DeviceMesh(shape), Link(latency, bandwidth)
    found = fit_link(mesh, samples(mesh, link, len(shape) - 1))
    # Where one part is a trace of every time, that part is known less well.
    assert found.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-3)
    assert found.latency_seconds == pytest.approx(latency, rel=1e-3)


def test_noise_of_ten_percent_moves_the_figures_by_less() -> None:
    mesh, link = DeviceMesh((4,)), Link(2e-5, 5e9)
    found = fit_link(mesh, samples(mesh, link, 0, lambda number: 1.1 if number % 2 else 0.9))
    assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=0.1)
    assert found.bandwidth_bytes_per_second == pytest.approx(link.bandwidth_bytes_per_second, rel=0.1)


def test_a_cache_is_what_passes_are_fast_up_to() -> None:
    """With a faster cache of 2 MiB in it, and where memory is as fast as any cache."""
    fast, mib = 1 / 25e9, 2**20
    times = {
        1: fast / 3,
        2: fast / 3,
        4: fast,
        8: fast * 1.2,
        16: fast * 0.9,
        32: fast * 3,
        64: fast * 5,
        128: fast * 6,
    }
    assert cache_bytes({size * mib: size * mib * each for size, each in times.items()}) == 32 * mib
    times[8] = fast * 5
    assert cache_bytes({size * mib: size * mib * each for size, each in times.items()}) == 4 * mib
    assert cache_bytes({size * mib: size * mib * fast for size in times}) == 0


def test_inconsistent_times_give_no_negative_figures() -> None:
    mesh = DeviceMesh((2,))
    steep = [CollectiveSample("all_gather", (0,), size, float(size) ** 2) for size in (1, 10, 100)]
    assert fit_link(mesh, steep).latency_seconds == 0
    falling = [CollectiveSample("all_gather", (0,), size, 1 / size) for size in (1, 10, 100)]
    with pytest.raises(CalibrationError, match="do not grow with their size"):
        fit_link(mesh, falling)


@pytest.mark.parametrize("probe", probes(["float32", "float64", "bfloat16"]), ids=lambda probe: probe.name)
def test_a_probe_launches_the_kernels_it_is_timed_for(probe: Any) -> None:
    graph = normalize(probe.build())
    plan = search(graph, builtin("cpu", DeviceMesh((1,)))).plan
    nodes = optimize_program(partition_graph(graph, plan.stages[0])).nodes
    assert len([node for node in nodes if not node.share_map]) == probe.launches


def test_half_precision_products_are_measured_at_the_size_of_float32() -> None:
    """OpenBLAS computes both; at a size at which calls take most of the time, their rates look several times lower."""
    size = {probe.name.removeprefix("matmul_"): probe.operations for probe in probes(DTYPES) if probe.operations}
    assert size["float16"] == size["bfloat16"] == size["float32"] > size["float64"]
    rates = builtin("cpu", DeviceMesh((2,))).device.flops_per_second
    assert min(rates["float16"], rates["bfloat16"]) > 0.8 * rates["float32"]


# The last one: products by stored weights have a single row there, which is a hundredth of the work of many rows.
ONE_OF_EACH = tuple({probe.kernel: probe for probe in KERNEL_PROBES}.values())


@pytest.fixture(scope="module", params=["one of each", pytest.param("all", marks=pytest.mark.slow)])
def calibrated(tmp_path_factory: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Path]]:
    """A calibration, and its file, with one kernel of each class or with all kernels, which take longer to compile."""
    out = tmp_path_factory.mktemp("calibration") / "host.json"
    probed = KERNEL_PROBES if request.param == "all" else ONE_OF_EACH
    with mock.patch.object(kernels, "KERNEL_PROBES", probed):
        yield calibrate([2], out, dtypes=["float32"], sizes=SIZES, repeats=3, timeout_seconds=600), out


def test_two_processes_measure_this_machine(calibrated: Any) -> None:
    found, out = calibrated
    assert [path.name for path in out.parent.iterdir()] == ["host.json"]
    assert load_machine(out, DeviceMesh((2,))) == found.cluster
    assert DistributedConfig.parse({"mesh_shape": [2], "machine": str(out)}).cluster == found.cluster
    (link,), device = found.cluster.links, found.cluster.device
    figures = [*device.flops_per_second.values(), device.memory_bandwidth_bytes_per_second, device.launch_seconds]
    figures += [link.bandwidth_bytes_per_second, *(sample.seconds for sample in (*found.collectives, *found.probes))]
    assert all(figure > 0 and math.isfinite(figure) for figure in figures)
    assert math.isfinite(link.latency_seconds)
    assert device.memory_bytes > 2**20
    assert device.cache_bytes in (0, *PASS_BYTES[:-1])
    assert len(found.collectives) == len(COMMUNICATING) * len(SIZES)
    for kind in COMMUNICATING:
        times = {sample.nbytes: sample.seconds for sample in found.collectives if sample.kind == kind}
        assert sorted(times) == list(SIZES)
        assert times[SIZES[-1]] > times[SIZES[0]]
    assert device.flops_per_second["float32"] == device.flops_per_second["default"]
    # The table has a row a measurement, and what it says of the error is so.
    rates, classes, fits = found.tables()
    assert fits.row_count == len(found.collectives)
    assert rates.row_count == 8
    assert classes.row_count == len(kernels.KERNEL_PROBES)
    assert set(device.kernels) == set(KERNEL_CLASSES)
    errors = found.kernel_errors()
    assert all(math.isfinite(error) and error >= -1 for error in errors.values())
    for sample, error in zip(found.collectives, found.relative_errors(), strict=True):
        assert sample.seconds * (1 + error) == pytest.approx(predicted_seconds(found.cluster, sample))


def test_a_plan_can_be_made_for_it(calibrated: Any, tmp_path: Path) -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = hidet.trace_from(hidet.ops.matmul(x, hidet.zeros([8, 8], device="cpu")), [x])
    config = {"mesh_shape": [2], "machine": calibrated[1]}
    result = hidet.distributed.auto_parallel(graph, config, {}, tmp_path / "out")
    assert 0 < result.predicted_seconds < 1


def test_nothing_is_written_after_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"the time limit of 0\.05 s is over"):
        calibrate([2], tmp_path / "host.json", dtypes=["float32"], timeout_seconds=0.05)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtypes": ["float12"]}, "float12"),
        ({"dtypes": []}, r"\[\]"),
        ({"sizes": [1024]}, "two or more"),
        ({"sizes": [0, 1024]}, r"\[0, 1024\]"),
        ({"repeats": 0}, "repeats must be 1 or more; got 0"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0; got 0"),
        ({"timeout_seconds": math.nan}, "got nan"),
        ({"nnodes": 2, "rdzv": "10.0.0.1:29500"}, "--node-rank is missing"),
        ({"nnodes": 2, "node_rank": 1, "rdzv": "10.0.0.1"}, r"not '10\.0\.0\.1'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=says):
        calibrate([2], tmp_path / "host.json", **arguments)
    monkeypatch.setenv("HIDET_DIST_SECRET", "0123456789abcdef")
    with pytest.raises(ConfigError, match="3 devices cannot be divided equally among 2 hosts"):
        calibrate([3], tmp_path / "host.json", nnodes=2, node_rank=0, rdzv="10.0.0.1:29500")
    with pytest.raises(SpecError, match="got 0"):
        calibrate([0], tmp_path / "host.json")
    for out in (tmp_path, tmp_path / "gone" / "host.json"):
        with pytest.raises(ConfigError, match=re.escape(f"{out} cannot be written")):
            calibrate([2], out)
    assert not list(tmp_path.iterdir())


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    run = CliRunner().invoke
    out = str(tmp_path / "host.json")
    wrong = run(app, ["calibrate", "--mesh", "two", "--out", out])
    assert wrong.exit_code == 1
    assert "'two' is not a mesh" in wrong.output
    refused = run(app, ["calibrate", "--mesh", "2", "--out", str(tmp_path / "gone" / "host.json")])
    assert refused.exit_code == 1
    assert "cannot be written" in refused.output
    assert not list(tmp_path.iterdir())
