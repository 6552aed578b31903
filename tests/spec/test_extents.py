"""Extents: arithmetic of symbolic dims, and what of it can be split."""

import hidet
import pytest
from hidet.ir.expr import if_then_else, symbol_var
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.errors import SpecError
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.extents import evaluate, local_extent, part_shape, same_extent, symbols_in
from hidet_dist.spec.symbols import SymbolPlan, local_symbols

BATCH, SEQ = symbol_var("batch"), symbol_var("seq")


@given(batch=st.integers(1, 50), seq=st.integers(1, 50))
def test_arithmetic_is_evaluated_as_written(batch, seq):
    sizes = {"batch": batch, "seq": seq}
    assert evaluate(BATCH * SEQ + 3, sizes) == batch * seq + 3
    assert evaluate((SEQ + 1) // 2 - SEQ % 3, sizes) == (seq + 1) // 2 - seq % 3
    assert evaluate(if_then_else(SEQ < 12, SEQ, 12), sizes) == min(seq, 12)


def test_sizes_other_than_arithmetic_are_refused():
    with pytest.raises(ValueError, match="not arithmetic"):
        evaluate(hidet.ir.primitives.max(SEQ, BATCH), {"batch": 1, "seq": 1})
    with pytest.raises(ValueError, match="not arithmetic"):
        evaluate(BATCH, {"seq": 1})


def test_equal_extents_are_equal_however_written():
    assert same_extent(BATCH * SEQ, SEQ * BATCH)
    assert same_extent((BATCH + SEQ) * 2, BATCH * 2 + SEQ * 2)
    assert not same_extent(BATCH, SEQ)
    assert not same_extent(BATCH * 2, 32)
    assert symbols_in([SEQ * 2, BATCH]) == ["seq", "batch"]


@given(
    numbers=st.lists(st.integers(1, 12), max_size=2),
    batch_multiple=st.integers(1, 12),
    seq_multiple=st.integers(1, 12),
    shards=st.integers(1, 24),
    count=st.integers(1, 5),
)
def test_a_shard_times_the_shards_is_the_whole(numbers, batch_multiple, seq_multiple, shards, count):
    whole = BATCH * SEQ
    for number in numbers:
        whole = whole * number
    multiples = {"batch": batch_multiple, "seq": seq_multiple}
    divisor = batch_multiple * seq_multiple
    for number in numbers:
        divisor *= number
    local = local_extent(whole, shards, multiples)
    assert (local is not None) == (divisor % shards == 0)
    if local is not None:
        symbols = [SymbolPlan(name, multiple, multiple) for name, multiple in multiples.items()]
        sizes = {"batch": batch_multiple * count, "seq": seq_multiple * (count + 1)}
        local_sizes = local_symbols(symbols, DeviceMesh(prime_factors(shards) or (1,)))
        values = {symbol.name: sizes[symbol.symbol] // symbol.shards for symbol in local_sizes}
        assert evaluate(local, values) * shards == evaluate(whole, sizes)


def prime_factors(number: int) -> tuple[int, ...]:
    """Ascending; each divisor of the number is a product of some of them, that is, a group size of the mesh."""
    for prime in range(2, number + 1):
        if number % prime == 0:
            return (prime, *prime_factors(number // prime))
    return ()


def test_a_sum_is_never_split():
    assert local_extent(BATCH + SEQ, 2, {"batch": 2, "seq": 2}) is None
    assert local_extent(BATCH + SEQ, 1, {"batch": 2, "seq": 2}) is not None


def test_shards_of_symbolic_dims_beside_fixed_ones():
    mesh, multiples, uneven = DeviceMesh((2, 3)), {"batch": 2}, TensorShardSpec.parse("(S1[4,3,2])")

    def local(spec: str) -> tuple[str, ...]:
        return tuple(map(str, part_shape((BATCH, 10, 9), TensorShardSpec.parse(spec), mesh, multiples)))

    assert local("(S0, S1, R)") == ("batch_over_2", "4", "9")  # 10 is padded to 12
    assert local("(R, S0, S1)") == ("batch", "5", "3")
    assert local("(S0, R, S1[4,3,2])") == ("batch_over_2", "10", str(part_shape((9,), uneven, mesh)[0]))
    for misfit in ("(S1, R, R)", "(S0[2,1], R, R)"):
        with pytest.raises(SpecError, match="batch into"):
            local(misfit)
    with pytest.raises(SpecError, match="does not divide"):
        local("(R, S1[4,3,2], R)")
