"""Latency and bandwidth of a link from measured collectives."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.errors import CalibrationError
from hidet_dist.machine.calibration.samples import CollectiveSample
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.spec import DeviceMesh

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
