"""The figures of a machine for which its cost model comes closest to what was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hidet_dist.calibration.samples import CollectiveSample
from hidet_dist.errors import CalibrationError
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.machine.kernels import KernelCost, Work
from hidet_dist.spec import DeviceMesh

_COSTS = ("seconds_per_operation", "seconds_per_byte", "seconds_per_call")
_ANY = Device("any", {"default": 1.0}, 1.0, 1, 0.0)


def predicted_seconds(cluster: Cluster, sample: CollectiveSample) -> float:
    """What the cost model says of a collective that was measured."""
    of_kind = {
        "all_gather": cluster.all_gather_seconds,
        "reduce_scatter": cluster.reduce_scatter_seconds,
        "all_reduce": cluster.all_reduce_seconds,
        "all_to_all": cluster.all_to_all_seconds,
    }
    return of_kind[sample.kind](sample.nbytes, sample.axes)


def fit_link(mesh: DeviceMesh, samples: Sequence[CollectiveSample]) -> Link:
    """The link for which the cost model comes closest to the samples, in the least squares of the relative errors.

    A collective's predicted time is ``A a + B / w``, with A and B from the closed forms of :class:`Cluster`, a latency
    a of 0 or more seconds and a bandwidth w above 0 bytes/s. Sizes span decades, so errors count relative to the time.

    Raises
    ------
    CalibrationError
        When the times do not rise with the size, so that no bandwidth can be told.
    """

    def seconds(latency: float, sample: CollectiveSample) -> float:
        return predicted_seconds(Cluster(mesh, (Link(latency, 1.0),) * mesh.ndim, _ANY), sample)

    per_byte = [seconds(0.0, sample) / sample.seconds for sample in samples]
    steps = [(seconds(1.0, sample) - seconds(0.0, sample)) / sample.seconds for sample in samples]
    # The normal equations of the least squares of steps * a + per_byte / w - 1.
    ss, sb, bb = _dot(steps, steps), _dot(steps, per_byte), _dot(per_byte, per_byte)
    s, b = sum(steps), sum(per_byte)
    determinant = ss * bb - sb * sb
    latency = (s * bb - b * sb) / determinant if determinant > 0 else -1.0
    if latency < 0:
        latency = 0.0
    inverse = (b - sb * latency) / bb
    if not inverse > 0:
        raise CalibrationError(
            f"The collectives over the mesh axes {samples[0].axes} took no longer the larger they were: "
            f"{', '.join(f'{sample.nbytes} bytes {sample.seconds:.2e} s' for sample in samples)}. Measure larger sizes."
        )
    return Link(latency, 1.0 / inverse)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def fit_kernel(
    device: Device, kernel: str, unknown: Sequence[str], samples: Sequence[tuple[Sequence[Work], float]]
) -> KernelCost:
    """The costs of a class of kernels for which the cost model comes closest to its samples' seconds.

    A sample is the work of kernels and their seconds without launches. ``unknown`` are the fields of
    :class:`KernelCost` that are not 0. Of what comes from memory each byte takes as long as the device's bandwidth
    says, or as one from a cache if that is longer. Errors count relative to the time; no cost is below 0.

    Raises
    ------
    CalibrationError
        When no cost above 0 makes sense of the samples.
    """
    best: tuple[float, KernelCost] | None = None
    for slow_memory in (True, False):
        for count in range(1, len(unknown) + 1):
            for own in itertools.combinations(unknown, count):
                found = _solved(device, kernel, own, samples, slow_memory)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
    if best is None:
        raise CalibrationError(
            f"The times of the {kernel} kernels make no sense: {', '.join(f'{own:.2e} s' for _, own in samples)}."
        )
    return best[1]


def _solved(
    device: Device,
    kernel: str,
    own: Sequence[str],
    samples: Sequence[tuple[Sequence[Work], float]],
    slow_memory: bool,
) -> tuple[float, KernelCost] | None:
    """The sum of the squared relative errors of the best costs, of which only ``own`` are not 0, and the costs.

    ``slow_memory``: bytes from memory take as long as its bandwidth says; else all bytes take the same time.
    """
    memory = 1 / device.memory_bandwidth_bytes_per_second
    rows, rest = [], []
    for work, seconds in samples:
        beyond = sum(device.beyond_cache(one) for one in work) if slow_memory else 0
        counts = {
            "seconds_per_operation": sum(one.operations for one in work),
            "seconds_per_byte": sum(one.moved_bytes for one in work) - beyond,
            "seconds_per_call": sum(one.calls for one in work),
        }
        rows.append([counts[name] / seconds for name in own])
        rest.append(1 - beyond * memory / seconds)
    # Columns of equal size: they differ by many orders of magnitude.
    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)
    if not scale.all():
        return None
    costs = np.linalg.lstsq(matrix / scale, np.array(rest), rcond=None)[0] / scale
    if (costs < 0).any():
        return None
    found = KernelCost(**dict.fromkeys(_COSTS, 0.0) | dict(zip(own, costs.tolist(), strict=True)))
    trial = replace(device, kernels={kernel: found})
    errors = [sum(trial.kernel_seconds(one) or 0.0 for one in work) / seconds - 1 for work, seconds in samples]
    return math.fsum(error * error for error in errors), found
