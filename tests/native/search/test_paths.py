"""Shortest paths: those of a search in whole numbers, whose ties are broken as defined."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.native.search.paths import NativePaths, flags_of, nodes_of

SIZE = 7
EDGE = st.tuples(st.integers(0, SIZE - 1), st.sampled_from([0, 1, 2, 3, 5, 10]), st.booleans())
GRAPHS = st.lists(st.lists(EDGE, max_size=6), min_size=SIZE, max_size=SIZE)
TICK = 2.0**-20  # seconds of a unit: sums of such floats are exact


def expected(edges: list[list[tuple[int, int, bool]]], source: int) -> tuple[list, dict[int, tuple[int, int]]]:
    """Find the prices (units, communicating edges, edges) of all nodes, None if unreachable, and their last edges."""
    price: list = [None] * SIZE
    price[source] = (0, 0, 0)
    last: dict[int, tuple[int, int]] = {}
    queue, order, settled = [((0, 0, 0), 0, source)], 1, set()
    while queue:
        so_far, _, node = heapq.heappop(queue)
        if node in settled:
            continue
        settled.add(node)
        for number, (after, units, communicates) in enumerate(edges[node]):
            total = so_far[0] + units, so_far[1] + communicates, so_far[2] + 1
            if price[after] is None or total < price[after]:
                price[after], last[after] = total, (node, number)
                heapq.heappush(queue, (total, order, after))
                order += 1
    return price, last


@settings(max_examples=200, deadline=None)
@given(GRAPHS, st.permutations(range(SIZE)), st.integers(0, SIZE - 1))
def test_paths_are_the_shortest_ones_whatever_is_asked_first(
    edges: list[list[tuple[int, int, bool]]], asked: list[int], other: int
) -> None:
    paths, expanded = NativePaths(), []

    def expand(node: int) -> None:
        expanded.append(node)
        of_node = edges[node]
        after, seconds, flags = ([edge[part] for edge in of_node] for part in range(3))
        paths.expand(node, nodes_of(after), [TICK * units for units in seconds], flags_of(flags))

    for source in (asked[0], other):
        price, last = expected(edges, source)
        for target in asked:
            one = nodes_of([target])
            if price[target] is None:
                with pytest.raises(LookupError, match=f"from node {source} to"):
                    paths.reach(source, one, expand)
                continue
            paths.reach(source, one, expand)
            units, communicating, _ = price[target]
            assert paths.seconds(source, one) == [TICK * units]
            assert paths.communicating(source, one) == [communicating]
            if target != source:
                assert paths.last_edge(source, target) == last[target]
    assert len(expanded) == len(set(expanded)), "each node is expanded once"
    found = sum(price is not None for source in {asked[0], other} for price in expected(edges, source)[0])
    assert paths.size == sum(len(edges[node]) for node in expanded) + found


def test_no_node_beyond_the_targets_is_expanded() -> None:
    paths, expanded = NativePaths(), []

    def expand(node: int) -> None:
        expanded.append(node)
        paths.expand(node, nodes_of([node + 1]), [1e-6], flags_of([True]))

    targets = nodes_of([3, 1])
    paths.reach(0, targets, expand)
    assert expanded == [0, 1, 2, 3]
    assert paths.seconds(0, targets) == [pytest.approx(3e-6, rel=1e-15), 1e-6]
    assert paths.communicating(0, targets) == [3, 1]


def test_long_times_do_not_overflow() -> None:
    """Sums of times beyond what ticks of 128 bits hold stay the greatest."""
    paths = NativePaths()

    def expand(node: int) -> None:
        edges = {0: ([1, 3], [1e300, 1.0]), 1: ([2], [float("inf")])}.get(node, ([node + 1], [1e30]))
        paths.expand(node, nodes_of(edges[0]), edges[1], flags_of([True] * len(edges[0])))

    targets = nodes_of([1, 2, 9])
    paths.reach(0, targets, expand)
    first, second, far = paths.seconds(0, targets)
    assert 1e7 < first < second <= far
