"""``calibrate``: measurement of the running machine, and writing of a machine file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hidet_dist import launch
from hidet_dist.calibration.fit import cache_bytes, fit_kernel, fit_link, predicted_seconds
from hidet_dist.calibration.samples import PASS_BYTES, CollectiveSample, ProbeSample, load_slowest, pass_name
from hidet_dist.errors import CalibrationError, ConfigError
from hidet_dist.machine.cluster import LIBRARY, Cluster, Device, Link
from hidet_dist.machine.file import save_machine
from hidet_dist.machine.kernels import ATTENTION, STORED_PRODUCTS, KernelCost, Work
from hidet_dist.progress import Progress
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import COMMUNICATING

if TYPE_CHECKING:
    from rich.table import Table

    from hidet_dist.calibration.probes import Probe


DTYPES = ("float32", "float64", "float16", "bfloat16")
SIZES = tuple(4**exponent for exponent in range(4, 13))
"""The sizes of measured collectives in bytes: 256 B to 16 MiB."""
REPEATS = 20
TIMEOUT_SECONDS = 600.0
# The fields of KernelCost that are fitted for a class of kernels; for other classes, _BYTES_AND_CALLS.
_UNKNOWN = {
    "matmul": ("seconds_per_operation", "seconds_per_byte", "seconds_per_call"),
    **dict.fromkeys(STORED_PRODUCTS, ("seconds_per_operation", "seconds_per_byte")),
    ATTENTION: ("seconds_per_operation", "seconds_per_byte"),
    "convolution": ("seconds_per_operation", "seconds_per_byte", "seconds_per_call"),
    "elementwise": ("seconds_per_operation", "seconds_per_byte", "seconds_per_call"),
    "function": ("seconds_per_operation",),
}
_BYTES_AND_CALLS = ("seconds_per_byte", "seconds_per_call")
_STOP_SECONDS = 30.0  # the time that the launcher has to end the ranks after the time limit


@dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Attributes
    ----------
    cluster: the fitted machine, as written to the file.
    collectives: the time of each measured collective, on the slowest rank.
    probes: the time of each probe, on the slowest rank.
    """

    cluster: Cluster
    collectives: tuple[CollectiveSample, ...]
    probes: tuple[ProbeSample, ...]

    def relative_errors(self) -> list[float]:
        """Compute the relative error of the cost model for each collective: fitted over measured seconds, less 1."""
        return [predicted_seconds(self.cluster, sample) / sample.seconds - 1 for sample in self.collectives]

    def kernel_errors(self) -> dict[str, float]:
        """Compute the relative error of the cost model for each probe of kernels, by the probe's title."""
        from hidet_dist.calibration.kernels import KERNEL_PROBES, work_in

        seconds, device = {sample.name: sample.seconds for sample in self.probes}, self.cluster.device
        return {
            probe.title: sum(device.kernel_seconds(kernel_work) or 0.0 for kernel_work in work_in(probe))
            / seconds[probe.title]
            - 1
            for probe in KERNEL_PROBES
        }

    def tables(self) -> list[Table]:
        """Make tables of the device, the links, and the measured and fitted time of each kernel and collective."""
        from rich.table import Table

        device, mesh = self.cluster.device, self.cluster.mesh
        rates = Table(title=f"A device: {device.name}", title_justify="left")
        rates.add_column("figure")
        rates.add_column("value", justify="right")
        for dtype, rate in device.flops_per_second.items():
            rates.add_row(f"arithmetic, {dtype}", f"{rate / 1e9:.2f} GFLOP/s")
        rates.add_row("memory bandwidth", f"{device.memory_bandwidth_bytes_per_second / 1e9:.2f} GB/s")
        rates.add_row("caches", f"{device.cache_bytes / 2**20:.2f} MiB")
        rates.add_row("memory", f"{device.memory_bytes / 2**30:.2f} GiB")
        rates.add_row("launch of a kernel", f"{device.launch_seconds * 1e6:.2f} us")
        for axis, link in enumerate(self.cluster.links):
            where = f"mesh axis {mesh.axis_names[axis]} ({mesh.shape[axis]})"
            rates.add_row(f"{where}, latency", f"{link.latency_seconds * 1e6:.2f} us")
            rates.add_row(f"{where}, bandwidth", f"{link.bandwidth_bytes_per_second / 1e9:.3f} GB/s")
        fits = Table(title="Collectives, measured and as fitted", title_justify="left")
        fits.add_column("collective")
        for column in ("axes", "bytes", "measured [us]", "fitted [us]", "error"):
            fits.add_column(column, justify="right")
        for sample, error in zip(self.collectives, self.relative_errors(), strict=True):
            axes, micro = "".join(map(str, sample.axes)), sample.seconds * 1e6
            fits.add_row(
                sample.kind, axes, str(sample.nbytes), f"{micro:.1f}", f"{micro * (1 + error):.1f}", f"{error:+.0%}"
            )
        kernels = Table(title="Kernels, measured and as fitted", title_justify="left")
        kernels.add_column("kernel")
        for column in ("measured [us]", "fitted [us]", "error"):
            kernels.add_column(column, justify="right")
        seconds = {sample.name: sample.seconds for sample in self.probes}
        for title, error in self.kernel_errors().items():
            micro = seconds[title] * 1e6
            kernels.add_row(title, f"{micro:.1f}", f"{micro * (1 + error):.1f}", f"{error:+.0%}")
        return [rates, kernels, fits] if self.collectives else [rates, kernels]


def calibrate(
    mesh_shape: Sequence[int],
    out: str | Path,
    *,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    nnodes: int = 1,
    node_rank: int | None = None,
    rdzv: str | None = None,
) -> Calibration:
    """Measure this machine as a mesh of processes, and write a machine file for ``distributed_config['machine']``.

    Each rank is a process of the launcher that communicates as serving processes do. Collectives are measured by size,
    over each mesh axis and over all axes together, and each axis's latency and bandwidth are fitted to the times. All
    ranks also run small compiled programs at the same time: matrix products by dtype, an element-wise operator on more
    data than a cache holds, a chain of tiny kernels, and float32 kernels of each class at sizes of real models. Passes
    over growing data find how much of it a cache holds. Nothing else should run on the machine.

    Parameters
    ----------
    mesh_shape: sequence of int
        Devices along each mesh axis, such as ``[2]``.
    out: path
        The machine file, written atomically.
    dtypes: sequence of str
        The dtypes whose matrix products are measured. Other dtypes get the rate of float64 if it is measured, else the
        lowest rate.
    sizes: sequence of int
        The sizes of collectives, in bytes of the tensor that a group holds together; at least two.
    repeats: int
        The number of measurements of each figure, of which the median is taken.
    timeout_seconds: float
        The time limit of the ranks in seconds.
    nnodes: int
        The number of hosts, each with consecutive ranks. Each host makes this call with the same arguments and writes
        the same figures, except that ``Device.memory_bytes`` and ``name`` are the host's.
    node_rank: int, optional
        The number of this host, from 0; for several hosts.
    rdzv: str, optional
        An address and port of host 0, such as ``10.0.0.1:29500``; for several hosts.

    Returns
    -------
    Calibration
        The fitted machine and the measured times.

    Raises
    ------
    ConfigError, SpecError
        When an argument is invalid, before anything is measured.
    CalibrationError
        When a rank fails, the time limit is exceeded, or no figures fit the measurements.
    """
    mesh = DeviceMesh(tuple(mesh_shape))
    out = Path(out)
    _check(out, dtypes, sizes, repeats, timeout_seconds)
    problem = launch.hosts_problem(nnodes, node_rank, rdzv)
    if problem:
        raise ConfigError(problem)
    if mesh.size % nnodes:
        raise ConfigError(f"A mesh of {mesh.size} devices cannot be divided equally among {nnodes} hosts.")
    ranks = mesh.size // nnodes
    from hidet_dist.calibration.kernels import build_kernels
    from hidet_dist.calibration.probes import build_probe, probes

    programs = probes(dtypes)
    with tempfile.TemporaryDirectory(prefix="hidet_dist-calibration-") as name, Progress() as progress:
        folder = Path(name)
        with progress.task("Compiling") as task:
            task.total(len(programs) + 1)
            build_kernels(mesh, folder / "kernels.json")
            task.advance()
            for probe in programs:
                build_probe(probe, mesh, folder / probe.name)
                task.advance()
        with progress.task("Measuring"):
            settings = {
                "folder": name,
                "mesh_shape": mesh.shape,
                "groups": _groups(mesh),
                "kinds": COMMUNICATING,
                "sizes": sorted(sizes),
                "repeats": repeats,
                "probes": [probe.name for probe in programs],
                "timeout_seconds": timeout_seconds,
            }
            (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
            hosts = [] if rdzv is None else [f"--nnodes={nnodes}", f"--node-rank={node_rank}", f"--rdzv={rdzv}"]
            _launch(ranks, hosts, folder / "settings.json", timeout_seconds)
            collectives, times = load_slowest([folder / f"rank{rank}.json" for rank in range(mesh.size)])
    device = _device(ranks, programs, times)
    links = tuple(_link(mesh, axis, collectives, device) for axis in range(mesh.ndim))
    calibration = Calibration(Cluster(mesh, links, device), tuple(collectives), tuple(times))
    save_machine(calibration.cluster, out)
    return calibration


def _check(out: Path, dtypes: Sequence[str], sizes: Sequence[int], repeats: int, timeout_seconds: float) -> None:
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"{out} cannot be written: name a file in an existing folder.")
    if not dtypes or set(dtypes) - set(DTYPES) or len(set(dtypes)) != len(dtypes):
        raise ConfigError(f"The dtypes to measure must be some of {', '.join(DTYPES)}; got {list(dtypes)}.")
    if len(set(sizes)) < 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"The sizes to measure must be two or more numbers of bytes above 0; got {list(sizes)}.")
    if not isinstance(repeats, int) or repeats < 1:
        raise ConfigError(f"repeats must be 1 or more; got {repeats!r}.")
    if not (timeout_seconds > 0 and math.isfinite(timeout_seconds)):
        raise ConfigError(f"timeout_seconds must be above 0; got {timeout_seconds!r}.")


def _groups(mesh: DeviceMesh) -> list[list[int]]:
    """List the groups of mesh axes to measure: each axis with several devices, and all such axes together."""
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    return [[axis] for axis in axes] + ([axes] if len(axes) > 1 else [])


def _launch(ranks: int, hosts: Sequence[str], settings: Path, timeout_seconds: float) -> None:
    """Run the ranks of this host to their end; ``hosts`` are the launcher's options for several hosts."""
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(ranks), "--timeout", str(timeout_seconds), *hosts]
    command += ["-m", "hidet_dist.calibration.ranks", str(settings)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_seconds + _STOP_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(f"The ranks did not end within {timeout_seconds:g} s.") from error
    if done.returncode:
        raise CalibrationError(f"A rank failed (exit status {done.returncode}):\n{done.stderr.strip()}")


def _device(ranks: int, programs: Sequence[Probe], times: Sequence[ProbeSample]) -> Device:
    """Compute the figures of a device, which is an equal part of this host, from the times of probes."""
    seconds = {sample.name: sample.seconds for sample in times}
    rates, launch, bandwidth = {}, 0.0, 0.0
    for probe in programs:
        if probe.operations:
            rates[probe.name.removeprefix("matmul_")] = probe.operations / seconds[probe.name]
        elif probe.moved_bytes:
            bandwidth = probe.moved_bytes / seconds[probe.name]
        else:
            launch = seconds[probe.name] / probe.launches
    default = rates.get("float64", min(rates.values()))
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // ranks)
    name = f"{_processor()}, {threads} of {os.cpu_count()} threads"
    device = Device(
        name,
        {"default": default, **rates},
        bandwidth,
        _memory_bytes() // ranks,
        launch,
        cache_bytes=cache_bytes({nbytes: seconds[pass_name(nbytes)] for nbytes in PASS_BYTES}),
        places_shards=True,
        fusion=LIBRARY,
    )
    return replace(device, kernels=_kernels(device, seconds))


def _kernels(device: Device, seconds: Mapping[str, float]) -> dict[str, KernelCost]:
    """Fit the cost of each class of kernels to all of its probes."""
    from hidet_dist.calibration.kernels import KERNEL_PROBES, work_in

    samples: dict[str, list[tuple[list[Work], float]]] = {}
    for probe in KERNEL_PROBES:
        samples.setdefault(probe.kernel, []).append((work_in(probe), seconds[probe.title]))
    device = replace(device, kernels={})
    # Elementwise operators and functions first: kernels of the other classes absorb them.
    for kernel in ("elementwise", "function", *(name for name in samples if name not in ("elementwise", "function"))):
        unknown = _UNKNOWN.get(kernel, _BYTES_AND_CALLS)
        cost = fit_kernel(device, kernel, unknown, [_remaining(device, kernel, *sample) for sample in samples[kernel]])
        device = replace(device, kernels={**device.kernels, kernel: cost})
    return {kernel: device.kernels[kernel] for kernel in samples}


def _remaining(device: Device, kernel: str, work: Sequence[Work], seconds: float) -> tuple[list[Work], float]:
    """Determine the work of a class of kernels within a probe, and its fraction of the probe's seconds.

    The seconds of the other classes, whose costs are known, are subtracted. The difference of very short times is
    noise; it must be above 0.
    """
    if kernel == "function":
        own = [Work("function", sum(part.functions for part in work), 0, calls=0)]
        others = list(work)
    else:
        own = [replace(part, functions=0) for part in work if part.kernel == kernel]
        functions = sum(part.functions for part in work if part.kernel == kernel)
        others = [part for part in work if part.kernel != kernel]
        others.append(Work("function", functions, 0, calls=0))
    known = sum(device.kernel_seconds(part) or 0.0 for part in others)
    return own, max(seconds - known, device.launch_seconds)


def _link(mesh: DeviceMesh, axis: int, collectives: Sequence[CollectiveSample], device: Device) -> Link:
    """Fit the link of a mesh axis."""
    samples = [sample for sample in collectives if sample.axes == (axis,)]
    # An axis of one device has no collectives, and no cost depends on its link.
    return fit_link(mesh, samples) if samples else Link(0.0, device.memory_bandwidth_bytes_per_second)


def _processor() -> str:
    """Return the name of this host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def _memory_bytes() -> int:
    """Return the bytes of the host's memory, or the limit of the control group if it is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no control group, or "max" for no limit
        return physical
    return min(physical, limit)
