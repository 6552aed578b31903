"""Parts of meshes' shares and of specs: shards in proportion, their text, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.errors import SpecError
from hidet_dist.reshard import Step, moves
from hidet_dist.spec import DeviceMesh, SpecPattern, TensorShardSpec
from hidet_dist.spec.extents import evaluate, part_interval, part_shape
from hidet_dist.spec.parts import in_lowest_terms, part_sizes

axes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def meshes(draw):
    shares = draw(st.lists(axes, min_size=1, max_size=3))
    return DeviceMesh(tuple(map(len, shares)), (), tuple(shares))


@st.composite
def placed(draw):
    """A mesh, a spec on it whose parts are the mesh's shares or others, and a shape that the spec fits."""
    mesh = draw(meshes())
    ndim = draw(st.integers(1, 3))
    per_dim, parts = [[] for _ in range(ndim)], {}
    for axis in draw(st.permutations(range(mesh.ndim))):
        dim = draw(st.none() | st.integers(0, ndim - 1))
        if dim is not None:
            per_dim[dim].append(axis)
            size = mesh.shape[axis]
            own = in_lowest_terms(draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)))
            if own != mesh.shares_of(axis) and draw(st.booleans()):
                parts[axis] = own
    spec = TensorShardSpec(tuple(map(tuple, per_dim)), tuple(parts.items()))
    return mesh, spec, tuple(spec.units(dim, mesh) * draw(st.integers(1, 2)) for dim in range(ndim))


@given(placed())
def test_shards_cover_each_element_once_for_each_replica(case):
    mesh, spec, shape = case
    spec.validate(shape, mesh)
    count = np.zeros(shape, int)
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        local = spec.local_shape(shape, mesh, coordinate)
        part = count[spec.slices(shape, mesh, coordinate)]
        assert part.shape == local
        assert tuple(one.start for one in spec.slices(shape, mesh, coordinate)) == spec.shard_offset(
            shape, mesh, coordinate
        )
        assert all(own <= most for own, most in zip(local, spec.local_shape(shape, mesh), strict=True))
        part += 1
        # The extents with symbols are those of the device.
        symbolic = part_shape(shape, spec, mesh)
        sizes = part_sizes(spec.symbols(mesh), mesh, coordinate)
        assert tuple(evaluate(extent, sizes) for extent in symbolic) == local
    assert (count == mesh.size // spec.num_shards(mesh)).all()
    assert spec.padded_shape(shape, mesh) == shape


@given(placed())
def test_parts_are_as_large_as_the_spec_or_the_shares_say(case):
    mesh, spec, shape = case
    given = dict(spec.parts)
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        local = spec.local_shape(shape, mesh, coordinate)
        for dim, split in enumerate(spec.mesh_axes_per_dim):
            extent = shape[dim]
            for axis in split:
                parts = given.get(axis, mesh.shares_of(axis))
                extent = extent * parts[coordinate[axis]] // sum(parts)
            assert local[dim] == extent
            parts = spec.split(dim, mesh).parts
            begin, size = part_interval(shape[dim], parts, [coordinate[axis] for axis in split])
            assert (begin, size) == (spec.shard_offset(shape, mesh, coordinate)[dim], local[dim])


@given(placed())
def test_a_spec_and_its_pattern_print_what_they_parse(case):
    _, spec, _ = case
    assert TensorShardSpec.parse(str(spec)) == spec
    assert SpecPattern.parse(str(spec)) == SpecPattern.of(spec)
    assert SpecPattern.of(spec).matches(spec)


def test_a_pattern_without_parts_matches_all_parts():
    spec = TensorShardSpec.parse("(S0[2,1]1, R)")
    assert spec == TensorShardSpec(((0, 1), ()), ((0, (4, 2)),))
    assert SpecPattern.parse("(S01, ?)").matches(spec)
    assert not SpecPattern.parse("(S0[1,2]1, ?)").matches(spec)
    assert str(spec.with_dim(0, (1,))) == "(S1, R)"
    assert str(spec.with_dim(1, (2,), ((2, (1, 3)),))) == "(S0[2,1]1, S2[1,3])"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(S0[2,1,1])", "has 3 parts along axis 0"),
        ("(S0[5,3])", "leave them out"),
        ("(S0[2,0])", "whole numbers from 1"),
        ("(S0[])", "whole numbers"),
        ("(S0[1,x])", "Not a tensor sharding spec"),
    ],
)
def test_parts_that_do_not_fit_are_refused(text, says):
    with pytest.raises(SpecError, match=says):
        TensorShardSpec.parse(text).validate((24,), DeviceMesh((2,), (), ((5, 3),)))


def test_symbols_of_parts_say_their_values():
    mesh = DeviceMesh((7, 2), ("gpu", "x_2"))
    names = TensorShardSpec.parse("(S0[5,5,5,5,4,4,4], S1[1,2])").symbols(mesh)
    assert names == {"part_of_gpu__5x4_4x3": 5, "part_of_x_2__1_2": 2}
    assert part_sizes(names, mesh, (4, 1)) == {"part_of_gpu__5x4_4x3": 4, "part_of_x_2__1_2": 2}
    for wrong in ("part_of_gpu__5x4", "part_of_y__1_2", "batch"):
        with pytest.raises(SpecError):
            part_sizes([wrong], mesh, (0, 0))


@given(meshes())
def test_a_mesh_prints_what_it_parses(mesh):
    assert DeviceMesh.parse(str(mesh)) == mesh
    assert mesh.is_uneven() == any(len(set(mesh.shares_of(axis))) > 1 for axis in range(mesh.ndim))


def test_shares_are_kept_in_lowest_terms_and_equal_ones_make_an_even_mesh():
    assert str(DeviceMesh((2, 2), ("node", "gpu"), ((), (22, 10)))) == "[node=2, gpu=11:5]"
    assert DeviceMesh((2,), (), ((8, 8),)) == DeviceMesh((2,))
    assert DeviceMesh((1, 2), (), ((3,), (1, 1))).shares == ()
    assert DeviceMesh((2,), ("gpu",), ((2, 1),)).without_shares() == DeviceMesh((2,), ("gpu",))


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        (((1, 2, 3),), "2 coordinates but 3 shares"),
        (((1, 0),), "whole numbers from 1"),
        (((1, 2.0),), "whole numbers from 1"),
        (((1, 2**40),), "whole numbers from 1 to 65536"),
        (((1, 2), ()), "1 axes but shares for 2"),
    ],
)
def test_a_mesh_refuses_shares_that_do_not_fit(shares, says):
    with pytest.raises(SpecError, match=says):
        DeviceMesh((2,), (), shares)


def test_a_dim_that_uneven_axes_split_is_not_padded():
    mesh, spec = DeviceMesh((2,), (), ((2, 1),)), TensorShardSpec(((0,),))
    assert not spec.fits((8,), mesh, padded=True)
    with pytest.raises(SpecError, match="into 3, which does not divide it"):
        spec.validate((8,), mesh, padded=True)
    assert spec.fits((8,), DeviceMesh((2,)), padded=True)


def test_an_uneven_axis_moves_between_dims_that_are_multiples_of_its_shares():
    mesh = DeviceMesh((2, 2), (), ((), (1, 2)))
    spec = TensorShardSpec.parse("(S01, R)")
    steps = {str(step) for step, _ in moves(spec, (12, 12), mesh)}
    assert "all_gather(axes=1, dim=0)" in steps
    assert "all_to_all(axes=1, dim=0, to_dim=1)" in steps
    assert not any(str(step).startswith("all_to_all(axes=1,") for step, _ in moves(spec, (12, 8), mesh))
    with pytest.raises(SpecError, match="does not divide"):
        Step("all_to_all", (1,), 0, 1).after(spec, (12, 8), mesh)
    even = {str(step) for step, _ in moves(TensorShardSpec.parse("(S10, R)"), (12, 12), mesh)}
    assert "all_to_all(axes=0, dim=0, to_dim=1)" in even


def test_a_device_holds_its_share_of_both_axes():
    mesh, spec = DeviceMesh((2, 2), (), ((1, 2), (3, 1))), TensorShardSpec.parse("(S01)")
    parts = [spec.slices((24,), mesh, coordinate)[0] for coordinate in itertools.product(range(2), range(2))]
    assert [(part.start, part.stop) for part in parts] == [(0, 6), (6, 8), (8, 20), (20, 24)]
