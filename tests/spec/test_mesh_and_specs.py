import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hidet_dist.errors import SpecError
from hidet_dist.spec import DeviceMesh, OpShardSpec, ReduceFn, TensorShardSpec

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda sizes: DeviceMesh(tuple(sizes)))


@st.composite
def placed(draw):
    """A mesh, a spec on it, and a shape that the spec divides."""
    mesh = draw(meshes)
    axes = draw(st.permutations(range(mesh.ndim)))
    ndim = draw(st.integers(0, 4))
    per_dim = [[] for _ in range(ndim)]
    if ndim:
        for axis in axes:
            dim = draw(st.none() | st.integers(0, ndim - 1))
            if dim is not None:
                per_dim[dim].append(axis)
    spec = TensorShardSpec(tuple(map(tuple, per_dim)))
    shape = tuple(mesh.group_size(own) * draw(st.integers(1, 3)) for own in per_dim)
    return mesh, spec, shape


@given(meshes)
def test_mesh_numbers_its_ranks_row_major_and_prints_what_it_parses(mesh):
    assert DeviceMesh.parse(str(mesh)) == mesh
    assert [mesh.coordinate(rank) for rank in range(mesh.size)] == list(itertools.product(*map(range, mesh.shape)))
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


def test_peers_differ_along_the_named_axes_only():
    mesh = DeviceMesh((2, 3, 2))
    assert mesh.peers(7, [1]) == tuple(mesh.rank((1, i, 1)) for i in range(3)) == (7, 9, 11)
    assert mesh.peers(0, [0, 2]) == (0, 1, 6, 7)
    assert mesh.peers(5, []) == (5,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(((),), "at least one axis"), (((0,),), "0"), (((2,), ("a", "b")), "2 names"), (((2, 2), ("a", "a")), "distinct")],
)
def test_a_mesh_refuses_what_is_none(arguments, says):
    with pytest.raises(SpecError, match=says):
        DeviceMesh(*arguments)


@given(placed())
def test_spec_round_trips_and_is_a_value(case):
    _, spec, _ = case
    again = TensorShardSpec.parse(str(spec))
    assert again == spec
    assert hash(again) == hash(spec)


def test_spec_is_written_as_in_the_rfc():
    assert str(TensorShardSpec(((0,), (1,), ()))) == "(S0, S1, R)"
    assert str(TensorShardSpec(((0, 1), ()))) == "(S01, R)"
    assert TensorShardSpec.parse("(S10,R)").mesh_axes_per_dim == ((1, 0), ())
    assert TensorShardSpec.parse("()").ndim == 0


@pytest.mark.parametrize("text", ["S0, R", "(S, R)", "(X)", "(S0, S0)", "(S00)", "(R", "(Sa)", "(R,)"])
def test_malformed_specs_are_refused(text):
    with pytest.raises(SpecError):
        TensorShardSpec.parse(text)


@given(placed())
def test_shards_tile_the_tensor(case):
    """Shards of the local shape, at their offsets, cover each element; as often as the tensor is replicated."""
    mesh, spec, shape = case
    covered = np.zeros(shape, int)
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        slices = spec.slices(shape, mesh, coordinate)
        assert covered[slices].shape == spec.local_shape(shape, mesh)
        assert tuple(s.start for s in slices) == spec.shard_offset(shape, mesh, coordinate)
        covered[slices] += 1
    assert (covered == mesh.size // spec.num_shards(mesh)).all()


@given(placed(), st.integers(0, 40))
def test_padded_shards_tile_the_tensor_and_its_padding(case, less):
    """Of any extents: shards of equal shape, none of them all padding, and only the last ones padded."""
    mesh, spec, shape = case
    shape = tuple(max(1, 7 * size - less) for size in shape)
    assume(spec.fits(shape, mesh, padded=True))
    local, whole = spec.local_shape(shape, mesh), spec.padded_shape(shape, mesh)
    assert spec.is_padded(shape, mesh) == (not spec.fits(shape, mesh))
    assert spec.local_nbytes(shape, 4, mesh) == 4 * math.prod(local)
    covered = np.zeros(whole, int)
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        own = tuple(s.stop - s.start for s in spec.slices(shape, mesh, coordinate))
        assert all(0 < size <= most for size, most in zip(own, local, strict=True))
        offset = spec.shard_offset(shape, mesh, coordinate)
        covered[tuple(slice(begin, begin + size) for begin, size in zip(offset, local, strict=True))] += 1
        covered[spec.slices(shape, mesh, coordinate)] += mesh.size
    real = tuple(map(slice, shape))
    replicas = mesh.size // spec.num_shards(mesh)
    assert (covered[real] == replicas * (mesh.size + 1)).all()
    covered[real] = replicas
    assert (covered == replicas).all()


def test_a_dim_split_by_more_axes_has_shards_of_the_shards():
    mesh = DeviceMesh((2, 4))
    shards = {text: TensorShardSpec.parse(text).local_shape((50257,), mesh) for text in ("(S0)", "(S1)", "(S01)")}
    assert shards == {"(S0)": (25132,), "(S1)": (12566,), "(S01)": (6283,)}
    assert TensorShardSpec.parse("(S01)").slices((50257,), mesh, (1, 3)) == (slice(43981, 50257),)
    # What divides is not padded, though the dim would be if it were split further.
    assert TensorShardSpec.parse("(S0)").local_shape((30522,), mesh) == (15261,)
    assert TensorShardSpec.parse("(S01)").padded_shape((30522,), mesh) == (30528,)
    # Nine rows in shards of two would leave the last devices nothing.
    assert not TensorShardSpec.parse("(S01)").fits((9,), mesh, padded=True)
    with pytest.raises(SpecError, match="only padding"):
        TensorShardSpec.parse("(S01)").local_shape((9,), mesh)


def test_major_axis_splits_first():
    spec, mesh = TensorShardSpec.parse("(S10)"), DeviceMesh((2, 3))
    assert spec.shard_offset((12,), mesh, (1, 2)) == (10,)  # axis 1 is major: (2 * 2 + 1) * 2
    assert TensorShardSpec.parse("(S01)").shard_offset((12,), mesh, (1, 2)) == (10,)
    assert TensorShardSpec.parse("(S01)").shard_offset((12,), mesh, (1, 0)) == (6,)
    assert spec.shard_offset((12,), mesh, (1, 0)) == (2,)


@pytest.mark.parametrize(
    ("spec", "shape", "says"),
    [("(S0)", (4, 4), "1 dims"), ("(S2, R)", (4, 4), "mesh axis 2"), ("(S0, R)", (3, 4), "does not divide")],
)
def test_a_spec_that_does_not_fit_says_why(spec, shape, says):
    spec = TensorShardSpec.parse(spec)
    with pytest.raises(SpecError, match=says):
        spec.validate(shape, DeviceMesh((2, 2)))
    assert not spec.fits(shape, DeviceMesh((2, 2)))


@pytest.mark.parametrize(
    "text",
    [
        "(R, S0), (S0, R) -> (R, R) | all_reduce(sum,axes=0)",
        "(S0, R), (R, R) -> (S0, R)",
        "() -> ()",
        "-> (S0)",
        "(S01) -> (R), (S1) | all_reduce(max,axes=01) ; ",
        "(R, S01) -> (S0, R) | reduce_scatter(average,axes=0,dim=0) all_reduce(average,axes=1)",
    ],
)
def test_operator_spec_round_trips(text):
    spec = OpShardSpec.parse(text)
    assert OpShardSpec.parse(str(spec)) == spec
    assert len({spec, OpShardSpec.parse(str(spec))}) == 1


def test_partial_spec_undoes_the_scatter_of_the_reduce_functions():
    spec = OpShardSpec.parse("(R, S01) -> (S0, R) | reduce_scatter(sum,axes=0,dim=0) all_reduce(sum,axes=1)")
    assert str(spec.partial_spec(0)) == "(R, R)"
    assert [str(fn) for fn in spec.reduce_fns[0]] == ["reduce_scatter(sum, axes=0, dim=0)", "all_reduce(sum, axes=1)"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("gather", "sum", (0,)),
        ("all_reduce", "median", (0,)),
        ("all_reduce", "sum", ()),
        ("all_reduce", "sum", (0,), 1),
        ("reduce_scatter", "sum", (0,)),
    ],
)
def test_malformed_reduce_functions_are_refused(arguments):
    with pytest.raises(SpecError):
        ReduceFn(*arguments)


@pytest.mark.parametrize(
    "text", ["(R) (R)", "(R) -> (R) | sum", "R -> R", "(R) -> (R) | all_reduce(sum, axes=0, dim=1)"]
)
def test_malformed_operator_specs_are_refused(text):
    with pytest.raises(SpecError):
        OpShardSpec.parse(text)
