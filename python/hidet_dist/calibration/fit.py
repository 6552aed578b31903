"""Fitting of a machine's figures to measurements, by least squares of the cost model's relative errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hidet_dist.calibration.samples import CollectiveSample
from hidet_dist.errors import CalibrationError
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.machine.kernels import KernelCost, Work
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import COLLECTIVES

CACHE_SPEEDUP = 2.0
"""The least ratio of a cache's bandwidth to that of memory."""

_COSTS = ("seconds_per_operation", "seconds_per_byte", "seconds_per_call")
_ANY = Device("any", {"default": 1.0}, 1.0, 1, 0.0)


def predicted_seconds(cluster: Cluster, sample: CollectiveSample) -> float:
    """Predict the seconds of a measured collective with the cost model."""
    return cluster.collective_seconds(COLLECTIVES[sample.kind], sample.nbytes, sample.axes)


def fit_link(mesh: DeviceMesh, samples: Sequence[CollectiveSample]) -> Link:
    """Fit a link to samples, by least squares of the relative errors.

    The predicted time of a collective is ``A a + B / w`` seconds, with A and B from the closed forms of
    :class:`Cluster`, a latency ``a`` of 0 or more seconds and a bandwidth ``w`` above 0 bytes/s. Errors are relative
    because sizes span decades.

    Raises
    ------
    CalibrationError
        When the times do not rise with the size, so that no bandwidth fits.
    """

    def seconds(latency: float, sample: CollectiveSample) -> float:
        return predicted_seconds(Cluster(mesh, (Link(latency, 1.0),) * mesh.ndim, _ANY), sample)

    per_byte = [seconds(0.0, sample) / sample.seconds for sample in samples]
    steps = [(seconds(1.0, sample) - seconds(0.0, sample)) / sample.seconds for sample in samples]
    # Normal equations of minimizing |steps * a + per_byte / w - 1|^2.
    ss, sb, bb = _dot(steps, steps), _dot(steps, per_byte), _dot(per_byte, per_byte)
    s, b = sum(steps), sum(per_byte)
    determinant = ss * bb - sb * sb
    latency = (s * bb - b * sb) / determinant if determinant > 0 else -1.0
    if latency < 0:
        latency = 0.0
    inverse = (b - sb * latency) / bb
    if not inverse > 0:
        raise CalibrationError(
            f"The times of collectives over the mesh axes {samples[0].axes} do not grow with their size: "
            f"{', '.join(f'{sample.nbytes} bytes {sample.seconds:.2e} s' for sample in samples)}. Measure larger sizes."
        )
    return Link(latency, 1.0 / inverse)


def cache_bytes(passes: Mapping[int, float]) -> int:
    """Determine the bytes that a kernel may move at the rate of a cache, from the seconds of passes by their bytes.

    These are the bytes of the largest pass up to which all passes are at least :data:`CACHE_SPEEDUP` times as fast as
    the largest pass of all, whose bytes are in memory; 0 if there is none.
    """
    largest = max(passes)
    memory = largest / passes[largest]
    fitting = itertools.takewhile(lambda size: size / passes[size] >= CACHE_SPEEDUP * memory, sorted(passes))
    return max(fitting, default=0)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def fit_kernel(
    device: Device, kernel: str, unknown: Sequence[str], samples: Sequence[tuple[Sequence[Work], float]]
) -> KernelCost:
    """Fit the costs of a class of kernels to samples, by least squares of the relative errors; no cost is below 0.

    A byte from memory takes the time that the device's bandwidth gives, or that of a byte from a cache if it is longer.

    Parameters
    ----------
    device: Device
        The device, with its memory bandwidth in bytes/s and its cache in bytes.
    kernel: str
        The class of kernels.
    unknown: sequence of str
        The fields of :class:`KernelCost` that may differ from 0.
    samples: sequence of pairs
        The work of kernels, and their seconds without launches.

    Raises
    ------
    CalibrationError
        When no costs above 0 fit the samples.
    """
    best: tuple[float, KernelCost] | None = None
    for slow_memory in (True, False):
        for count in range(1, len(unknown) + 1):
            for fields in itertools.combinations(unknown, count):
                fitted = _solved(device, kernel, fields, samples, slow_memory)
                if fitted is not None and (best is None or fitted[0] < best[0]):
                    best = fitted
    if best is None:
        raise CalibrationError(
            f"No costs above 0 fit the times of the {kernel} kernels: "
            f"{', '.join(f'{seconds:.2e} s' for _, seconds in samples)}. Calibrate again on a quiet machine."
        )
    return best[1]


def _solved(
    device: Device,
    kernel: str,
    fields: Sequence[str],
    samples: Sequence[tuple[Sequence[Work], float]],
    slow_memory: bool,
) -> tuple[float, KernelCost] | None:
    """Fit costs of which only ``fields`` differ from 0; return the sum of squared relative errors, and the costs.

    With ``slow_memory`` bytes from memory take the time that its bandwidth gives; without it all bytes take the same
    time. Returns None if no such costs fit.
    """
    memory = 1 / device.memory_bandwidth_bytes_per_second
    rows, rest = [], []
    for work, seconds in samples:
        beyond = sum(device.beyond_cache(part) for part in work) if slow_memory else 0
        counts = {
            "seconds_per_operation": sum(part.operations for part in work),
            "seconds_per_byte": sum(part.moved_bytes for part in work) - beyond,
            "seconds_per_call": sum(part.calls for part in work),
        }
        rows.append([counts[name] / seconds for name in fields])
        rest.append(1 - beyond * memory / seconds)
    # The columns are scaled, as they differ by many orders of magnitude.
    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)
    if not scale.all():
        return None
    costs = np.linalg.lstsq(matrix / scale, np.array(rest), rcond=None)[0] / scale
    if (costs < 0).any():
        return None
    fitted = KernelCost(**dict.fromkeys(_COSTS, 0.0) | dict(zip(fields, costs.tolist(), strict=True)))
    trial = replace(device, kernels={kernel: fitted})
    errors = [sum(trial.kernel_seconds(part) or 0.0 for part in work) / seconds - 1 for work, seconds in samples]
    return math.fsum(error * error for error in errors), fitted
