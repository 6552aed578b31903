"""The work of operators whose rows use the matrices that were chosen for them: experts of a mixture.

Which ones will be chosen is not known. The numbers here are expected ones for choices that are uniform, independent of
one another from token to token, and different ones of each token. Where experts are split, the device with the most
rows decides how long all take.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hidet.graph import Operator

from hidet_dist.traits import Routed

_MOST_SUMMED = 4096  # rows up to which the distribution of the greatest number is summed up


@dataclass(frozen=True)
class RoutedWork:
    """The work of a routed product on the device with the most rows.

    Attributes
    ----------
    operations: scalar operations.
    read_bytes: the bytes read: those of rows that have an expert there, and of experts that have a row.
    weight_bytes: those of them that are the experts'.
    calls: the expected number of products: one for each expert that has a row, and each product of the operator.
    """

    operations: int
    read_bytes: int
    weight_bytes: int
    calls: int


def routed_work(op: Operator, routed: Routed, shapes: Sequence[Sequence[int]]) -> RoutedWork:
    """Expect the work of a local operator whose inputs have these local shapes (elements).

    What an operator computes between its products is written and read once.
    """
    tokens, choices = shapes[routed.chosen]
    experts = shapes[routed.labels][0]
    rows, used = expected_load(tokens, choices, experts, int(op.attrs["count"]))
    sizes = [math.prod(shape) * int(x.dtype.nbytes) for x, shape in zip(op.inputs, shapes, strict=True)]
    operations = weights = passed = 0
    for matrices in routed.matrices:
        _, *sides = shapes[matrices.weight]
        operations += math.ceil(rows * 2 * math.prod(sides))
        weights += min(sizes[matrices.weight], math.ceil(used * math.prod(sides) * _itemsize(op, matrices.weight)))
    read = sum(
        min(sizes[number], math.ceil(rows * shapes[number][-1] * _itemsize(op, number))) for number in routed.rows
    )
    if routed.last is not None:
        for product in routed.products:
            columns = shapes[product.weight][1 if product.transposed else 2]
            passed += 2 * math.ceil(rows * columns * _itemsize(op, product.weight))
    products = {matrices.weight for matrices in routed.matrices} | routed.rows
    others = sum(size for number, size in enumerate(sizes) if number not in products)
    calls = math.ceil(used) * len(routed.matrices)
    return RoutedWork(operations, weights + read + passed + others, weights, calls)


def _itemsize(op: Operator, number: int) -> int:
    return int(op.inputs[number].dtype.nbytes)


@functools.lru_cache(maxsize=4096)
def expected_load(tokens: int, choices: int, experts: int, count: int) -> tuple[float, float]:
    """Expect the rows of the device that has the most, and the number of its experts that have any.

    A token does not choose a given expert with a probability of ``1 - choices / count``, so all of ``tokens`` leave it
    with that to the power of their number (the occupancy problem: W. Feller, An Introduction to Probability Theory
    and Its Applications, vol. 1, II.5 and IV.2). The device with the most rows counts as if it had as many more tokens.

    Parameters
    ----------
    tokens, choices: int
        The tokens on a device, and the choices of each.
    experts: int
        The experts on a device.
    count: int
        The experts on all devices: as many as there are on a device if they are not split.
    """
    mean = tokens * choices * experts / count
    if not mean:
        return 0.0, 0.0
    rows = max(mean, _expected_most(tokens * choices, max(1, round(count / experts))))
    left = 1 - min(choices, count) / count
    return rows, experts * (1 - left ** (tokens * rows / mean))


def _expected_most(rows: int, parts: int) -> float:
    """Expect the greatest of ``parts`` numbers of rows, each of which belongs to any part alike.

    The numbers are taken for independent and binomial: ``E[max] = sum(1 - P(number <= k) ** parts)`` over k. Where they
    are large, for normal, with G. Blom's approximation of the greatest of several (Statistical Estimates and
    Transformed Beta-Variables, 1958).
    """
    if parts == 1:
        return float(rows)
    chance = 1 / parts
    if rows > _MOST_SUMMED:
        deviation = math.sqrt(rows * chance * (1 - chance))
        return rows * chance + deviation * statistics.NormalDist().inv_cdf((parts - 0.375) / (parts + 0.25))
    total, most = 0.0, 0.0
    for k in range(rows):
        ways = math.lgamma(rows + 1) - math.lgamma(k + 1) - math.lgamma(rows - k + 1)
        total += math.exp(ways + k * math.log(chance) + (rows - k) * math.log1p(-chance))
        most += 1 - min(total, 1.0) ** parts
    return most
