"""How symbolic dims are declared."""

import pytest

from hidet_dist.config import OptimizationConfig
from hidet_dist.errors import ConfigError
from hidet_dist.spec.symbols import SymbolSize


def test_a_size_alone_or_with_a_multiple():
    given = {"batch": {"expected": 16, "multiple_of": 8}, "seq": 128, "rows": {"expected": 4, "most": 9}}
    config = OptimizationConfig.parse({"symbols": given})
    assert config.symbols == {"batch": SymbolSize(16, 8), "seq": SymbolSize(128, 1), "rows": SymbolSize(4, 1, 9)}
    assert OptimizationConfig.parse({}).symbols == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["batch"], "must be a dict"),
        ({1: 16}, "the keys are names"),
        ({"batch": {"multiple_of": 8}}, "lacks 'expected'"),
        ({"batch": {"expected": 16, "multiple": 8}}, "Unknown key 'multiple'"),
        ({"batch": 0}, "'expected' must be a whole number from 1"),
        ({"batch": True}, "'expected' must be a whole number from 1"),
        ({"batch": {"expected": 16, "multiple_of": 1.5}}, "'multiple_of' must be a whole number from 1"),
        ({"batch": {"expected": 12, "multiple_of": 8}}, "'expected' = 12 is no multiple of 8"),
        ({"batch": {"expected": 12, "most": 8}}, "'expected' = 12 is more than the greatest size, 8"),
        ({"batch": {"expected": 12, "least": 13}}, "'expected' = 12 is less than the least size, 13"),
        ({"batch": {"expected": 12, "least": 0}}, "'least' must be a whole number from 1"),
        ({"batch": {"expected": 12, "most": 0}}, "'most' must be a whole number from 1"),
    ],
)
def test_malformed_declarations_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        OptimizationConfig.parse({"symbols": given})
