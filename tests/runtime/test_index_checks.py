"""Integers outside of a range, found in strided memory, and checks of inputs that do not fit them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hidet_dist import native
from hidet_dist.artifacts.manifest import IndexCheck, StageManifest, TensorSignature
from hidet_dist.errors import ArtifactError, InputError
from hidet_dist.runtime.index_checks import IndexChecks
from hidet_dist.runtime.tensors import buffer_of

DTYPES = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@given(st.data())
def test_the_first_integer_outside_is_found(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = data.draw(arrays.array_shapes(max_dims=3, max_side=5))
    x = data.draw(arrays.arrays(dtype, shape))
    view = x[tuple(slice(data.draw(st.integers(0, size - 1)), None, data.draw(st.integers(1, 3))) for size in shape)]
    ends = st.integers(-(2**62), 2**62) | st.integers(-3, 3) | st.integers(-300, 300)
    least, greatest = data.draw(ends), data.draw(ends)
    strides = [stride // dtype.itemsize for stride in view.strides]
    looking = native.StridedRange(dtype.itemsize, dtype.kind == "i", view.shape, strides, least, greatest)
    found = looking.first_outside(view.ctypes.data)
    outside = [place for place in np.ndindex(view.shape) if not least <= int(view[place]) <= greatest]
    if not outside:
        assert found is None
    else:
        place = sum(i * stride for i, stride in zip(outside[0], strides, strict=True))
        assert found == (place, int(view[outside[0]]))


@pytest.mark.parametrize("count", [1023, 1024, 5000])
def test_long_rows(count: int) -> None:
    x = np.zeros(count, np.int64)
    looking = native.StridedRange(8, True, [count], [1], -1, 1)
    assert looking.first_outside(x.ctypes.data) is None
    x[count - 1] = 2
    assert looking.first_outside(x.ctypes.data) == (count - 1, 2)


def stage(check: IndexCheck, dtype: str = "int64") -> StageManifest:
    """A stage with one input."""
    ids = TensorSignature(dtype, (2, 3), (2, 3), "(R, R)")
    empty: tuple[()] = ()
    return StageManifest("stage0", (1,), ("a",), (ids,), *[empty] * 6, index_checks=(check,))  # type: ignore[arg-type]


WHOLE = IndexCheck(0, (10,), 0, ((6,),), ((1,),), (0,))


def test_only_the_elements_that_are_indices_are_looked_at() -> None:
    x = np.array([[99, 1, 99], [99, 2, 99]])
    column = IndexCheck(0, (2,), 0, ((2,),), ((3,),), (1,))
    with pytest.raises(InputError, match=r"Input 0 is 2 at \[1, 1\]: .* into 2 rows, and must be from -2 to 1"):
        IndexChecks(stage(column)).check([buffer_of(x, "x")], {})
    x[1, 1] = -2
    IndexChecks(stage(column)).check([buffer_of(x, "x")], {})


@pytest.mark.parametrize(
    ("check", "dtype"),
    [
        (IndexCheck(1, (10,), 0, ((6,),), ((1,),), (0,)), "int64"),
        (IndexCheck(-1, (10,), 0, ((6,),), ((1,),), (0,)), "int64"),
        (WHOLE, "float32"),
        (IndexCheck(0, (10,), 0, ((7,),), ((1,),), (0,)), "int64"),
        (IndexCheck(0, (10,), 0, ((6,),), ((1,),), (1,)), "int64"),
        (IndexCheck(0, (10,), 0, ((2,),), ((-1,),), (0,)), "int64"),
        (IndexCheck(0, ("batch",), 0, ((6,),), ((1,),), (0,)), "int64"),
        (IndexCheck(0, (10,), 0, ((6,),), (), (0,)), "int64"),
    ],
)
def test_checks_that_do_not_fit_the_inputs_are_refused(check: IndexCheck, dtype: str) -> None:
    IndexChecks(stage(WHOLE))
    with pytest.raises(ArtifactError, match="Build the artifacts again"):
        IndexChecks(stage(check, dtype))
