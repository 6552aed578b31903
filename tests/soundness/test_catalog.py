"""No operator class of hidet without a rule, or a reason for having none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hidet
import pytest
from tests.recorded import check_recorded

from hidet_dist.rules.declared import DECLARED, REPLICATED, UNIMPORTABLE
from hidet_dist.soundness import catalog
from hidet_dist.soundness.catalog import BY_HAND, DERIVED, NONE, REPLICATE_ONLY
from hidet_dist.soundness.instances import MAKERS


@pytest.fixture(scope="module")
def entries() -> list[catalog.Entry]:
    return list(catalog.catalog())


def test_every_operator_class_is_in_a_group(entries):
    assert [entry.name for entry in entries if entry.group == NONE] == []


def test_all_imported_operator_classes_are_found_in_the_sources(entries):
    def below(cls: type) -> set[type]:
        return {cls}.union(*map(below, cls.__subclasses__()))

    names = {entry.name for entry in entries}
    imported = {catalog.full_name(cls) for cls in below(hidet.graph.Operator) if cls.__module__.startswith("hidet.")}
    abstract = {name.rpartition(".")[2] for name in imported - names} - {"Operator"}
    assert abstract == {
        "AdaptivePoolNdOp",
        "ArgReduceBaseOp",
        "AvgPoolNdOp",
        "BinaryElementwiseOp",
        "CumulativeBaseOp",
        "MaxPoolNdOp",
        "OpaqueOperator",
        "ReduceBaseOp",
        "UnaryElementwiseOp",
    }


def test_a_rule_comes_with_its_factors_and_a_missing_one_with_its_reason(entries):
    for entry in entries:
        assert entry.rule.count("->") == (entry.group in (DERIVED, BY_HAND)), entry
        assert bool(entry.reason) == (entry.group != DERIVED), entry


def test_the_tables_name_only_what_hidet_has(entries):
    names = {entry.name for entry in entries}
    assert {catalog.full_name(cls) for cls in (*MAKERS, *DECLARED, *REPLICATED)} <= names
    assert set(UNIMPORTABLE) <= {name.rpartition(".")[0] for name in names}
    assert not {*MAKERS} & {*REPLICATED}


def test_a_new_operator_class_is_noticed(monkeypatch):
    known = catalog.operator_classes()
    monkeypatch.setattr(catalog, "operator_classes", lambda: (*known[:3], "hidet.graph.ops.fresh.FreshOp"))
    groups = Counter(entry.group for entry in catalog.catalog())
    assert groups[NONE] == 1


def test_the_program_prints_the_counts_and_the_rules_on_record(capsys):
    assert catalog.main() == 0
    printed = capsys.readouterr().out
    last = printed.splitlines()[-1]
    assert f"{len(REPLICATED) + 2} {REPLICATE_ONLY}" in last
    assert f"{len(DECLARED)} {BY_HAND}" in last
    check_recorded(Path(__file__).parent / "rules.txt", printed)
