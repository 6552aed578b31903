from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import SpecError
from hidet_dist.machine import Cluster, Device, Link, builtin
from hidet_dist.reshard import (
    Step,
    cheapest_conversion,
    conversion_buffers,
    conversion_communication,
    conversion_seconds,
    moves,
    path,
    reduce_seconds,
    step_parts,
    step_seconds,
    walk,
)
from hidet_dist.spec import DeviceMesh, Layout, PartialSpec, ReduceFn, TensorShardSpec
from hidet_dist.spec.collectives import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER

LAUNCH, MEMORY = 1e-6, 1e9  # seconds of a launch, bytes per second between the toy device and its memory
DEVICE = Device("toy", {"default": 1e9}, MEMORY, 10**9, LAUNCH)
MESHES = ((2,), (4,), (1, 2), (2, 2), (2, 3), (4, 2), (2, 2, 2), (2, 3, 2))
REDUCE = {"sum": np.sum, "max": np.max, "average": np.mean}
parse = TensorShardSpec.parse


def cluster_of(mesh: tuple[int, ...], latency: float = 1e-6) -> Cluster:
    links = tuple(Link(latency * (axis + 1), 1e9 / (axis + 1)) for axis in range(len(mesh)))
    return Cluster(DeviceMesh(mesh), links, DEVICE)


def all_specs(shape: Sequence[int], mesh: DeviceMesh, without: Sequence[int] = ()) -> list[TensorShardSpec]:
    """Every spec that fits, with padding if need be, the order of the axes on a dim included."""
    found = set()
    for order in itertools.permutations(axis for axis in range(mesh.ndim) if axis not in without):
        for dims in itertools.product((None, *range(len(shape))), repeat=len(order)):
            per_dim: list[list[int]] = [[] for _ in shape]
            for axis, dim in zip(order, dims, strict=True):
                if dim is not None:
                    per_dim[dim].append(axis)
            spec = TensorShardSpec(tuple(map(tuple, per_dim)))
            if spec.fits(shape, mesh, padded=True):
                found.add(spec)
    return sorted(found, key=str)


def split_of(layout: Layout) -> TensorShardSpec:
    return layout.spec if isinstance(layout, PartialSpec) else layout


def nbytes(layout: Layout, shape: Sequence[int], mesh: DeviceMesh) -> int:
    """Of a local tensor of four-byte elements."""
    return split_of(layout).local_nbytes(shape, 4, mesh)


def place(rank: int, axes: Sequence[int], mesh: DeviceMesh) -> int:
    """The part that a rank has of a dim that the axes split, major to minor."""
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + mesh.coordinate(rank)[axis]
    return number


def distribute(whole: np.ndarray, layout: Layout, mesh: DeviceMesh) -> list[np.ndarray]:
    """The shard of each rank. Partial ones differ, and reduce to the shard. Padding is NaN."""
    spec = split_of(layout)
    values = []
    for rank in range(mesh.size):
        own = whole[spec.slices(whole.shape, mesh, mesh.coordinate(rank))]
        values.append(np.full(spec.local_shape(whole.shape, mesh), np.nan))
        values[rank][tuple(map(slice, own.shape))] = own
    if isinstance(layout, PartialSpec):
        for rank in range(mesh.size):
            number, count = place(rank, layout.mesh_axes, mesh), mesh.group_size(layout.mesh_axes)
            if layout.op == "sum":
                values[rank] = values[rank] * (2 * number + 1) / count**2  # 1 + 3 + 5 + ... = count^2
            elif layout.op == "max":
                values[rank] = values[rank] - number
            else:
                values[rank] = values[rank] + number - (count - 1) / 2
    return values


def assert_holds(values: list[np.ndarray], whole: np.ndarray, layout: Layout, mesh: DeviceMesh) -> None:
    """Each rank holds its shard, or what reduces to it, whatever lies in the padding."""
    spec = split_of(layout)
    for rank in range(mesh.size):
        value = values[rank]
        assert value.shape == spec.local_shape(whole.shape, mesh)
        if isinstance(layout, PartialSpec):
            value = REDUCE[layout.op]([values[peer] for peer in mesh.peers(rank, layout.mesh_axes)], axis=0)
        want = whole[spec.slices(whole.shape, mesh, mesh.coordinate(rank))]
        np.testing.assert_allclose(value[tuple(map(slice, want.shape))], want, rtol=1e-9)


def run(step: Step, values: list[np.ndarray], local: Sequence[int], mesh: DeviceMesh) -> list[np.ndarray]:
    """The semantics of a step on all ranks' shards; ``local`` is the shape of a shard after it."""
    results = []
    n = mesh.group_size(step.mesh_axes)
    for rank, own in enumerate(values):
        peers = sorted(mesh.peers(rank, step.mesh_axes), key=lambda peer: place(peer, step.mesh_axes, mesh))
        if step.kind == "slice":
            assert step.dim is not None
            behind = [(0, n * local[dim] - size if dim == step.dim else 0) for dim, size in enumerate(own.shape)]
            result = np.pad(own, behind)
        elif step.kind == "all_gather":
            assert step.dim is not None
            result = np.concatenate([values[peer] for peer in peers], axis=step.dim)
            result = np.take(result, range(local[step.dim]), axis=step.dim)
        elif step.kind == "all_to_all":
            mine = place(rank, step.to_axes, mesh)
            parts = [np.split(values[peer], n, axis=step.to_dim)[mine] for peer in peers]
            result = np.concatenate(parts, axis=step.dim)
        else:
            result = REDUCE[step.op]([values[peer] for peer in peers], axis=0)
        if step.kind in ("slice", "reduce_scatter"):
            assert step.dim is not None
            result = np.split(result, n, axis=step.dim)[place(rank, step.mesh_axes, mesh)]
        results.append(result)
    return results


def copy(size: float) -> float:
    return LAUNCH + 2 * size / MEMORY


def closed_form(step: Step, before: Layout, after: Layout, shape: Sequence[int], cluster: Cluster) -> float:
    """The cost of a step, from the formulas in rfcs/0004-search.md."""
    mesh = cluster.mesh
    n = mesh.group_size(step.mesh_axes)
    a = max(cluster.links[axis].latency_seconds for axis in step.mesh_axes)
    w = min(cluster.links[axis].bandwidth_bytes_per_second for axis in step.mesh_axes)
    sent, received = nbytes(before, shape, mesh), nbytes(after, shape, mesh)
    local = split_of(before).local_shape(shape, mesh)

    def contiguous(dim: int | None, axes: Sequence[int], outer: Sequence[int]) -> bool:
        return math.prod(outer[:dim]) == 1 and list(axes) == sorted(axes)

    if step.kind == "slice":
        return copy(received)
    if step.kind == "all_reduce":
        if step.op == "max":  # all that ranks have is gathered, then reduced
            return (n - 1) * (a + sent / w) + copy((n * sent + received) // 2)
        return 2 * (n - 1) * (a + sent / (n * w))
    if step.kind == "all_gather":
        cut = n * sent > received  # the padding
        reorder = 0 if contiguous(step.dim, step.mesh_axes, local) and not cut else copy(received)
        return (n - 1) * (a + n * sent / (n * w)) + reorder
    if step.kind == "reduce_scatter":
        reorder = 0 if contiguous(step.dim, step.mesh_axes, local) else copy(sent)
        reduced = copy((sent + received) // 2) if step.op == "max" else 0
        return (n - 1) * (a + sent / (n * w)) + reorder + reduced
    assert step.kind == "all_to_all"
    assert step.to_dim is not None
    part = [size // n if dim == step.to_dim else size for dim, size in enumerate(local)]
    pack = 0 if contiguous(step.to_dim, step.to_axes, local) else copy(sent)
    unpack = 0 if contiguous(step.dim, step.mesh_axes, part) else copy(received)
    return (n - 1) * (a + n * sent / (n * n * w)) + pack + unpack


def greedy_seconds(shape: Sequence[int], source: TensorShardSpec, target: TensorShardSpec, cluster: Cluster) -> float:
    """Gather, minor axes first, what the specs do not share, then slice; what can be sliced at once goes first."""
    mesh = cluster.mesh
    spec, seconds = source, 0.0

    def take(step: Step) -> None:
        nonlocal spec, seconds
        after = step.after(spec, shape, mesh)
        assert isinstance(after, TensorShardSpec)
        seconds += closed_form(step, spec, after, shape, cluster)
        spec = after

    def slices() -> None:
        for dim, wanted in enumerate(target.mesh_axes_per_dim):
            has = spec.mesh_axes_per_dim[dim]
            more = wanted[len(has) :]
            if more and wanted[: len(has)] == has and not set(more) & set(spec.mesh_axes):
                take(Step("slice", more, dim))

    slices()
    for dim, wanted in enumerate(target.mesh_axes_per_dim):
        has = spec.mesh_axes_per_dim[dim]
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(has, wanted, strict=False)))
        while len(spec.mesh_axes_per_dim[dim]) > kept:
            has = spec.mesh_axes_per_dim[dim]
            length = 1
            while len(has) - length > kept and has[-length - 1] < has[-length]:
                length += 1
            take(Step("all_gather", has[-length:], dim))
    slices()
    assert spec == target
    return seconds


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Cluster]:
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(st.lists(st.sampled_from((1, 2, 4, 6, 7, 8, 12, 13, 24, 47)), min_size=1, max_size=3))
    latency = draw(st.sampled_from((0.0, 1e-6, 1e-3)))
    return tuple(shape), cluster_of(mesh, latency)


@st.composite
def conversions(draw: st.DrawFn) -> tuple[tuple[int, ...], Cluster, Layout, Layout]:
    shape, cluster = draw(tensors())
    mesh = cluster.mesh
    axes = draw(st.lists(st.integers(0, mesh.ndim - 1), unique=True))
    source: Layout = draw(st.sampled_from(all_specs(shape, mesh, without=axes)))
    if axes and draw(st.booleans()):
        source = PartialSpec(split_of(source), draw(st.sampled_from(sorted(REDUCE))), tuple(axes))
    target: Layout = draw(st.sampled_from(all_specs(shape, mesh)))
    if isinstance(source, PartialSpec) and draw(st.booleans()):
        left = tuple(axis for axis in source.mesh_axes if axis not in split_of(target).mesh_axes)
        target = PartialSpec(split_of(target), source.op, left) if left else target
    return shape, cluster, source, target


@settings(max_examples=120, deadline=None)
@given(conversions())
def test_the_steps_turn_any_layout_into_any_other(case: tuple[tuple[int, ...], Cluster, Layout, Layout]) -> None:
    shape, cluster, source, target = case
    mesh = cluster.mesh
    whole = np.arange(1, math.prod(shape) + 1).reshape(shape)
    found = cheapest_conversion(shape, "float32", source, target, cluster)
    values, before, cost = distribute(whole, source, mesh), source, 0.0
    assert_holds(values, whole, source, mesh)
    for step, after in zip(found.steps, walk(found.steps, source, shape, mesh), strict=True):
        assert Step.parse(str(step)) == step
        values = run(step, values, split_of(after).local_shape(shape, mesh), mesh)
        assert_holds(values, whole, after, mesh)
        cost += closed_form(step, before, after, shape, cluster)
        before = after
    assert before == target
    assert found.seconds == pytest.approx(cost, rel=1e-12, abs=0)
    assert found.steps or source == target
    assert cheapest_conversion(shape, "float32", source, target, cluster) == found
    assert conversion_seconds(shape, "float32", [source], [target], cluster) == ((found.seconds,),)
    padded = any(split_of(layout).is_padded(shape, mesh) for layout in (source, target))
    if isinstance(source, TensorShardSpec) and isinstance(target, TensorShardSpec) and not padded:
        assert found.seconds <= greedy_seconds(shape, source, target, cluster) * (1 + 1e-12)


@settings(max_examples=30, deadline=None)
@given(tensors(), st.data())
def test_a_detour_is_never_cheaper(case: tuple[tuple[int, ...], Cluster], data: st.DataObject) -> None:
    shape, cluster = case
    a, b, c = (data.draw(st.sampled_from(all_specs(shape, cluster.mesh))) for _ in range(3))
    (ab, ac), (_, bc) = conversion_seconds(shape, "float16", [a, b], [b, c], cluster)
    assert ac <= (ab + bc) * (1 + 1e-12)


def steps_on(mesh: DeviceMesh, ndim: int) -> list[Step]:
    """Every step over any axes, in any order, and any dims."""
    steps = []
    for name, kind in COLLECTIVES.items():
        for count in range(1, mesh.ndim + 1):
            for axes, op in itertools.product(
                itertools.permutations(range(mesh.ndim), count), sorted(REDUCE) if kind.reduces else [""]
            ):
                if kind.moves:
                    for (dim, to_dim), order in itertools.product(
                        itertools.permutations(range(ndim), 2), itertools.permutations(axes)
                    ):
                        steps.append(Step(name, axes, dim, to_dim, order))
                elif kind.has_dim:
                    steps += [Step(name, axes, dim, op=op) for dim in range(ndim)]
                elif list(axes) == sorted(axes):
                    steps.append(Step(name, axes, op=op))
    return steps


@settings(max_examples=30, deadline=None)
@given(tensors(), st.booleans(), st.data())
def test_moves_are_the_steps_that_apply(
    case: tuple[tuple[int, ...], Cluster], uneven: bool, data: st.DataObject
) -> None:
    """They are told by the dims that a step changes; ``Step.after`` checks the whole result."""
    shape, cluster = case
    mesh = cluster.mesh
    if uneven and mesh.shape[0] > 1:
        mesh = DeviceMesh(mesh.shape, (), ((2, *(1,) * (mesh.shape[0] - 1)), *((),) * (mesh.ndim - 1)))
    layout: Layout = data.draw(st.sampled_from(all_specs(shape, mesh)))
    free = [axis for axis in range(mesh.ndim) if axis not in split_of(layout).mesh_axes]
    if free and data.draw(st.booleans()):
        layout = PartialSpec(split_of(layout), data.draw(st.sampled_from(sorted(REDUCE))), tuple(free))
    applying = {}
    for step in steps_on(mesh, len(shape)):
        try:
            applying[step] = step.after(layout, shape, mesh)
        except SpecError:
            continue
    assert dict(moves(layout, shape, mesh)) == applying


def test_a_layout_that_does_not_fit_has_no_moves() -> None:
    with pytest.raises(SpecError, match="only padding"):
        list(moves(parse("(S0, R)"), (1, 8), DeviceMesh((4,))))


def test_paths_check_the_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps between layouts that fit change a dim or two: whole layouts are not checked again."""
    checked = []
    real = TensorShardSpec.validate

    def counted(spec: TensorShardSpec, *case: Any, **options: Any) -> None:
        checked.append(spec)
        real(spec, *case, **options)

    monkeypatch.setattr(TensorShardSpec, "validate", counted)
    monkeypatch.setattr(path, "_GRAPHS", path._Graphs(path._MOST_KEPT))
    ends = [parse("(S0, R, R)"), parse("(R, R, S021)")]
    conversion_seconds((16, 48, 80), 4, ends, ends, cluster_of((2, 2, 2)))
    assert len(checked) == len(ends)


def test_bytes_of_conversions_come_from_the_paths_of_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning asks for the seconds of all tensors, then for the bytes."""
    made = []
    real = path._LayoutGraph.__init__

    def counted(graph: Any, *of: Any) -> None:
        made.append(of)
        real(graph, *of)

    monkeypatch.setattr(path._LayoutGraph, "__init__", counted)
    monkeypatch.setattr(path, "_GRAPHS", path._Graphs(path._MOST_KEPT))
    cluster, ends = cluster_of((2, 2)), [parse("(S0, R)"), parse("(R, S10)")]
    shapes = [(8, 8 * size) for size in range(1, 300)]
    for table in (conversion_seconds, conversion_buffers):
        for shape in shapes:
            table(shape, 4, ends, ends, cluster)
    assert len(made) == len(shapes)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(4,), (2, 2), (2, 3), (2, 2, 2)]),
    st.lists(st.tuples(*[st.sampled_from([1, 2, 4, 8, 10, 24, 32])] * 2), min_size=2, max_size=4),
    st.booleans(),
)
def test_conversions_are_those_of_a_tensor_by_itself(
    mesh: tuple[int, ...], shapes: list[tuple[int, int]], places: bool
) -> None:
    """Tensors whose dims are alike share the steps between layouts, but no price."""
    cluster = cluster_of(mesh)
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, places_shards=places))
    specs = {shape: all_specs(shape, cluster.mesh)[-12:] for shape in shapes}

    def tables(shape: tuple[int, int]) -> tuple[Any, Any, list[str]]:
        own = specs[shape]
        paths = [str(cheapest_conversion(shape, 4, own[0], target, cluster)) for target in own]
        seconds = conversion_seconds(shape, 4, own, own, cluster)
        return seconds, conversion_buffers(shape, 4, own, own, cluster), paths

    together = [tables(shape) for shape in shapes]
    for shape, shared in zip(shapes, together, strict=True):
        path._GRAPHS.clear()
        assert tables(shape) == shared


def test_tensors_whose_dims_are_alike_share_the_steps_between_layouts() -> None:
    path._GRAPHS.clear()
    cluster, ends = cluster_of((2, 2)), [parse("(S0, R)"), parse("(R, S10)")]
    for shape in ((8, 48), (16, 12), (64, 64), (4, 12), (12, 4), (6, 8)):
        conversion_seconds(shape, 4, ends, ends, cluster)
    # A dim of as many elements as there are devices has shards of one, and one of six is padded.
    assert len(path._GRAPHS._known) == 6
    assert len(path._GRAPHS._alike) == 4


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (2, 2, 2)])
def test_communication_is_that_of_the_steps(mesh: tuple[int, ...]) -> None:
    shape, cluster = (8, 1, 6), cluster_of(mesh)
    specs = all_specs(shape, cluster.mesh)[:20]
    table = conversion_communication(shape, "float32", specs, specs, cluster)
    for source, line in zip(specs, table, strict=True):
        for target, seconds in zip(specs, line, strict=True):
            layout: Layout = source
            expected = 0.0
            for step in cheapest_conversion(shape, "float32", source, target, cluster).steps:
                after = step.after(layout, shape, cluster.mesh)
                expected += step_parts(step, layout, after, shape, 4, cluster).communicate
                layout = after
            assert seconds == pytest.approx(expected, rel=1e-12, abs=0)
    assert any(map(any, table)), "some conversions communicate"


def test_few_graphs_of_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, ends = cluster_of((2, 2)), [parse("(S0, R)"), parse("(R, S10)")]
    shapes = [(8, 8 * size) for size in (1, 2, 3, 2, 1, 4, 1)]
    want = [conversion_seconds(shape, 4, ends, ends, cluster) for shape in shapes]
    graphs = path._Graphs(150)
    monkeypatch.setattr(path, "_GRAPHS", graphs)
    for shape, seconds in zip(shapes, want, strict=True):
        assert conversion_seconds(shape, 4, ends, ends, cluster) == seconds
        *others, last = graphs._known.values()
        assert sum(graph.size for graph in others) <= 150 and last.size > 0
    assert 1 <= len(graphs._known) < 4


@pytest.mark.parametrize("op", [None, "sum"])
def test_there_is_no_shorter_path(op: str | None) -> None:
    """The property of shortest paths: no step from any layout improves the seconds of the layout it leads to."""
    shape, cluster = (4, 1, 8), cluster_of((2, 2))
    mesh = cluster.mesh
    source: Layout = parse("(S0, R, R)")
    layouts: list[Layout] = [*all_specs(shape, mesh)]
    if op:
        source = PartialSpec(parse("(S0, R, R)"), op, (1,))
        layouts += [PartialSpec(spec, op, (1,)) for spec in all_specs(shape, mesh, without=(1,))]
    (row,) = conversion_seconds(shape, "float32", [source], layouts, cluster)
    seconds = dict(zip(layouts, row, strict=True))
    assert seconds[source] == 0
    reached = {source}
    for before in layouts:
        for step, after in moves(before, shape, mesh):
            longer = seconds[before] + step_seconds(step, before, after, shape, 4, cluster)
            assert seconds[after] <= longer * (1 + 1e-12)
            if math.isclose(seconds[after], longer, rel_tol=1e-12):
                reached.add(after)
    assert reached == set(layouts)  # and each is the seconds of some path


@pytest.mark.parametrize(
    ("source", "target", "copied"),
    [
        ("(R, S0)", "(R, R)", (0, 1)),  # what is gathered along an inner dim is joined
        ("(S0, R)", "(R, S0)", (1 / 2, 0)),  # what is sent is stacked
        ("(R, S0)", "(S0, R)", (0, 1 / 2)),
        ("(S0, R)", "(R, R)", (0, 0)),
    ],
)
def test_no_copy_is_counted_if_collectives_place_shards(source: str, target: str, copied: tuple[float, float]) -> None:
    copies = cluster_of((2,))
    places = dataclasses.replace(copies, device=dataclasses.replace(copies.device, places_shards=True))
    shape, size = (8, 16), 8 * 16 * 4
    (step,) = cheapest_conversion(shape, "float32", parse(source), parse(target), copies).steps
    arguments = (step, parse(source), parse(target), shape, 4)
    pack, communicate, unpack = step_parts(*arguments, copies)
    assert (pack, unpack) == tuple(copies.copy_seconds(int(part * size)) if part else 0.0 for part in copied)
    assert step_parts(*arguments, places) == (0.0, communicate, 0.0)
    assert communicate > 0


@pytest.mark.parametrize(
    ("step", "source", "copied"),
    [
        ("all_gather(axes=10, dim=1)", "(R, S10)", (0, 1)),
        ("all_gather(axes=10, dim=0)", "(S10, R)", (0, 1)),
        ("all_gather(axes=01, dim=1)", "(R, S01)", (0, 0)),
        ("all_to_all(axes=10, dim=0, to_dim=1)", "(S10, R)", (1 / 4, 1 / 4)),
        ("all_to_all(axes=10, dim=0, to_dim=1, to_axes=01)", "(S10, R)", (0, 1 / 4)),
        ("all_to_all(axes=01, dim=0, to_dim=1, to_axes=10)", "(S01, R)", (1 / 4, 0)),
    ],
)
def test_shards_in_descending_order_of_axes_are_copied(step: str, source: str, copied: tuple[float, float]) -> None:
    """Collectives that place shards do so in the order of group ranks, which is that of ascending axes."""
    cluster = cluster_of((2, 2))
    places = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, places_shards=True))
    shape, size, one = (8, 16), 8 * 16 * 4, Step.parse(step)
    before = parse(source)
    pack, _, unpack = step_parts(one, before, one.after(before, shape, places.mesh), shape, 4, places)
    assert (pack, unpack) == tuple(places.copy_seconds(int(part * size)) if part else 0.0 for part in copied)


@pytest.mark.parametrize(
    ("step", "exchange", "received"),
    [("all_reduce(max, axes=01)", "all_gather", 4), ("reduce_scatter(min, axes=01, dim=0)", "all_to_all", 1)],
)
def test_extremes_are_exchanged_and_reduced_by_a_kernel(step: str, exchange: str, received: int) -> None:
    """Where collectives place shards, which are in host memory, they keep NaN; those of devices do not."""
    cluster = cluster_of((2, 2))
    places = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, places_shards=True))
    shape, size, one = (8, 16), 8 * 16 * 4, Step.parse(step)
    before = PartialSpec(parse("(R, R)"), one.op, (0, 1))
    after = one.after(before, shape, cluster.mesh)
    result = split_of(after).local_nbytes(shape, 4, cluster.mesh)
    sent = cluster.collective_seconds(COLLECTIVES[exchange], 4 * size, (0, 1))
    reduced = cluster.copy_seconds((received * size + result) // 2)
    assert step_parts(one, before, after, shape, 4, cluster) == (0.0, sent, reduced)
    whole = places.collective_seconds(one.collective, size, (0, 1))
    assert step_parts(one, before, after, shape, 4, places) == (0.0, whole, 0.0)
    sums = Step.parse(step.replace(one.op, "sum"))
    assert step_parts(sums, PartialSpec(parse("(R, R)"), "sum", (0, 1)), after, shape, 4, cluster) == (0.0, whole, 0.0)


def steps(shape: tuple[int, ...], source: str | Layout, target: str, cluster: Cluster) -> list[str]:
    layout = parse(source) if isinstance(source, str) else source
    return [str(step) for step in cheapest_conversion(shape, "float32", layout, parse(target), cluster).steps]


def test_what_an_expert_would_send() -> None:
    shape, cluster = (1024, 1024), builtin("dgx-a100", DeviceMesh((2, 2)))
    assert steps(shape, "(R, R)", "(S0, R)", cluster) == ["slice(axes=0, dim=0)"]
    assert steps(shape, "(R, R)", "(S01, R)", cluster) == ["slice(axes=01, dim=0)"]
    assert steps(shape, "(S01, R)", "(S0, R)", cluster) == ["all_gather(axes=1, dim=0)"]
    assert steps(shape, "(S0, R)", "(R, S0)", cluster) == ["all_to_all(axes=0, dim=0, to_dim=1)"]
    assert steps(shape, "(S01, R)", "(S0, S1)", cluster) == ["all_to_all(axes=1, dim=0, to_dim=1)"]
    for target, expected in (
        ("(S1, R)", "reduce_scatter(sum, axes=1, dim=0)"),
        ("(R, S1)", "reduce_scatter(sum, axes=1, dim=1)"),
        ("(R, R)", "all_reduce(sum, axes=1)"),
    ):
        assert steps(shape, PartialSpec(parse("(R, R)"), "sum", (1,)), target, cluster) == [expected]


def test_padding_is_put_on_by_a_slice_of_the_whole_and_cut_off_where_all_of_it_is_gathered() -> None:
    cluster = builtin("dgx-a100", DeviceMesh((2, 4)))
    words = (50257, 768)
    assert steps(words, "(R, R)", "(S01, R)", cluster) == ["slice(axes=01, dim=0)"]
    assert steps(words, "(S01, R)", "(S0, R)", cluster) == ["all_gather(axes=1, dim=0)"]
    found = cheapest_conversion(words, "float32", parse("(S01, R)"), parse("(R, R)"), cluster)
    assert [str(step) for step in found.steps] == ["all_gather(axes=1, dim=0)", "all_gather(axes=0, dim=0)"]
    sent, kept = 50264 * 768 * 4, 50257 * 768 * 4
    gathers = cluster.collective_seconds(ALL_GATHER, sent // 2, (1,)) + cluster.collective_seconds(
        ALL_GATHER, sent, (0,)
    )
    assert found.seconds == pytest.approx(gathers + cluster.copy_seconds(kept))
    # 30522 divides by 2, so its halves are no unions of the padded eighths.
    assert steps((30522, 5), "(S01, R)", "(S0, R)", cluster)[0] == "all_gather(axes=01, dim=0)"
    for target in ("(S1, R)", "(S10, R)", "(R, S1)"):
        path = steps(words, "(S0, R)", target, cluster)
        assert not any("dim=0" in step for step in path if step.startswith(("all_to_all", "reduce_scatter")))


def test_an_all_to_all_is_sent_only_where_it_is_cheaper() -> None:
    """With a launch that costs more than the network, gathering to dim 0 and slicing, one copy, wins over two."""
    slow_kernels = Device("toy", {"default": 1e9}, 1e12, 10**9, 1e-3)
    cluster = Cluster(DeviceMesh((2,)), (Link(1e-9, 1e12),), slow_kernels)
    shape = (4, 8, 6)
    assert steps(shape, "(R, S0, R)", "(R, R, S0)", cluster_of((2,))) == ["all_to_all(axes=0, dim=1, to_dim=2)"]
    # From the first dim: one copy either way, and fewer bytes.
    assert steps(shape, "(S0, R, R)", "(R, S0, R)", cluster) == ["all_to_all(axes=0, dim=0, to_dim=1)"]
    # The order of two axes is changed on the way.
    wide = Cluster(DeviceMesh((2, 2)), (Link(1e-6, 1e6),) * 2, DEVICE)
    assert steps((64, 64), "(S01, R)", "(R, S10)", wide) == ["all_to_all(axes=01, dim=0, to_dim=1, to_axes=10)"]


def test_a_slow_network_is_spared_by_a_fast_one() -> None:
    """Two nodes of eight: the slow network carries an eighth of the tensor, the rest is gathered within the nodes."""
    cluster = builtin("dgx-a100-pod", DeviceMesh((2, 8)))
    found = cheapest_conversion((4096, 4096), "float16", parse("(S0, R)"), parse("(R, R)"), cluster)
    assert [str(step) for step in found.steps] == [
        "slice(axes=1, dim=1)",
        "all_gather(axes=0, dim=0)",
        "all_gather(axes=1, dim=1)",
    ]
    assert found.seconds < cluster.collective_seconds(ALL_GATHER, 4096 * 4096 * 2, (0,))
    assert str(found).startswith("(S0, R) -> (R, R): slice(axes=1, dim=1); all_gather")


def test_a_mesh_of_many_axes_is_no_hindrance() -> None:
    shape, cluster = (64, 64, 64), cluster_of((2,) * 7)
    source, target = parse("(S014, R, S2)"), parse("(S2, S10, R)")
    found = cheapest_conversion(shape, "float32", source, target, cluster)
    assert walk(found.steps, source, shape, cluster.mesh)[-1] == target
    assert found.seconds <= greedy_seconds(shape, source, target, cluster)
    assert conversion_seconds(shape, "float32", [source, target], [target], cluster) == ((found.seconds,), (0.0,))


@pytest.mark.parametrize("known", [False, True], ids=["at first", "beside known ones"])
def test_layouts_that_do_not_fit_are_refused(known: bool) -> None:
    cluster = cluster_of((2, 3))
    shape = (24, 12, 5)
    whole = TensorShardSpec.replicated(3)
    if known:
        cheapest_conversion(shape, "float32", PartialSpec(whole, "sum", (0,)), parse("(S0, S1, R)"), cluster)
    with pytest.raises(SpecError, match="only padding"):
        cheapest_conversion(shape, "float32", parse("(R, R, S01)"), whole, cluster)
    with pytest.raises(SpecError, match="for 2 dims"):
        cheapest_conversion(shape, "float32", whole, TensorShardSpec.replicated(2), cluster)
    with pytest.raises(SpecError, match="lacks it"):
        cheapest_conversion(shape, "float32", PartialSpec(whole, "sum", (2,)), whole, cluster)
    for source in (whole, PartialSpec(whole, "max", (0,)), PartialSpec(whole, "sum", (1,))):
        with pytest.raises(SpecError, match="is not partial over"):
            cheapest_conversion(shape, "float32", source, PartialSpec(whole, "sum", (0,)), cluster)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all_gather(axes=0)", "has wrong dims"),
        ("all_reduce(sum, axes=0, dim=1)", "has wrong dims"),
        ("all_to_all(axes=0, dim=1)", "has wrong dims"),
        ("all_gather(axes=0, dim=1, to_axes=0)", "has wrong dims"),
        ("all_to_all(axes=0, dim=1, to_dim=1)", "must move the same mesh axes"),
        ("all_to_all(axes=01, dim=1, to_dim=0, to_axes=12)", "must move the same mesh axes"),
        ("reduce_scatter(axes=0, dim=1)", "has a wrong reduction"),
        ("reduce_scatter(median, axes=0, dim=1)", "has a wrong reduction"),
        ("slice(sum, axes=0, dim=1)", "has a wrong reduction"),
        ("slice(axes=00, dim=1)", "distinct"),
        ("send(axes=0, dim=1)", "A step is one of"),
        ("slice axes=0", "Not a step"),
    ],
)
def test_malformed_steps_are_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Step.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slice(axes=0, dim=1)", "in use"),
        ("slice(axes=2, dim=1)", "in use"),
        ("slice(axes=3, dim=1)", "mesh"),
        ("slice(axes=1, dim=2)", "has no dim 2"),
        ("all_to_all(axes=0, dim=0, to_dim=1)", "would change the padding"),
        ("all_gather(axes=1, dim=0)", "other mesh axes"),
        ("all_to_all(axes=0, dim=1, to_dim=0)", "other mesh axes"),
        ("all_reduce(sum, axes=1)", "not partial over"),
        ("all_reduce(max, axes=2)", "not partial over"),
    ],
)
def test_a_step_that_does_not_apply_is_refused(text: str, says: str) -> None:
    layout = PartialSpec(parse("(S0, R)"), "sum", (2,))
    with pytest.raises(SpecError, match=says):
        Step.parse(text).after(layout, (8, 5), DeviceMesh((2, 2, 2)))


def test_reduce_functions_cost_what_the_same_steps_cost() -> None:
    cluster, shape = cluster_of((2, 2)), (24, 12, 5)
    b = math.prod(shape) * 4
    scatter, rest = ReduceFn("reduce_scatter", "sum", (0,), 1), ReduceFn("all_reduce", "sum", (1,))
    # What is scattered on a dim other than the first is first copied into rank order; what is left is half.
    expected = (
        cluster.collective_seconds(REDUCE_SCATTER, b, (0,))
        + cluster.copy_seconds(b)
        + cluster.collective_seconds(ALL_REDUCE, b // 2, (1,))
    )
    assert reduce_seconds(shape, "float32", parse("(R, R, R)"), (scatter, rest), cluster) == pytest.approx(expected)
    # On a machine where nothing else is cheaper, converting the partial value is just that.
    cluster = builtin("dgx-a100", DeviceMesh((2, 2)))
    for partial, fn in (("(R, S1, R)", ReduceFn("all_reduce", "max", (0,))), ("(R, R, R)", scatter)):
        source = PartialSpec(parse(partial), fn.op, fn.mesh_axes)
        (target,) = walk([Step.of(fn)], source, shape, cluster.mesh)
        seconds = reduce_seconds(shape, "float32", parse(partial), [fn], cluster)
        assert cheapest_conversion(shape, "float32", source, target, cluster).seconds == pytest.approx(
            seconds, rel=1e-12
        )
