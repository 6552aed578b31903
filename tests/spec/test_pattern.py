from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.errors import SpecError
from hidet_dist.spec import OpShardSpec, OpSpecPattern, SpecPattern, TensorShardSpec


@st.composite
def specs(draw: st.DrawFn) -> TensorShardSpec:
    """Specs of up to 4 dims on up to 3 mesh axes."""
    dims: list[list[int]] = [[] for _ in range(draw(st.integers(0, 4)))]
    for axis in draw(st.permutations(range(3))):
        if dims and draw(st.booleans()):
            dims[draw(st.integers(0, len(dims) - 1))].append(axis)
    return TensorShardSpec(tuple(map(tuple, dims)))


@given(specs(), st.data())
def test_freeing_dims_keeps_what_matched_and_what_is_printed_is_parsed(spec: TensorShardSpec, data: st.DataObject):
    whole = SpecPattern.of(spec)
    assert whole.spec == spec
    assert whole.matches(spec)
    free = data.draw(st.lists(st.booleans(), min_size=spec.ndim, max_size=spec.ndim))
    pattern = SpecPattern(tuple(None if f else axes for f, axes in zip(free, spec.mesh_axes_per_dim, strict=True)))
    assert pattern.matches(spec)
    assert (pattern.spec is None) == any(free)
    assert SpecPattern.parse(str(pattern)) == pattern
    other = data.draw(specs())
    same = other.ndim == spec.ndim and all(
        f or a == b for f, a, b in zip(free, spec.mesh_axes_per_dim, other.mesh_axes_per_dim, strict=True)
    )
    assert pattern.matches(other) == same


def test_patterns_of_operators_leave_tensors_and_reduce_functions_free() -> None:
    pattern = OpSpecPattern.parse("(?, S0), ? -> (R, ?)")
    assert str(pattern) == "(?, S0), ? -> (R, ?)"
    assert pattern.matches(OpShardSpec.parse("(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"))
    assert not pattern.matches(OpShardSpec.parse("(R, S0), (S0, R) -> (S0, R) | reduce_scatter(sum, axes=0, dim=0)"))
    assert not pattern.matches(OpShardSpec.parse("(R, S0) -> (R, R)"))


@pytest.mark.parametrize("text", ["S0", "(S0, X)", "(S0, S0)", "(??)", "", "(S0"])
def test_malformed_patterns_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        SpecPattern.parse(text)


@pytest.mark.parametrize("text", ["(S0)", "(S0), (R -> R", "(S0) (R) => (R)", "(S0) -> (R) | all_reduce(sum, axes=0)"])
def test_malformed_operator_patterns_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        OpSpecPattern.parse(text)
