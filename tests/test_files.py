"""JSON text: an entry a line in the first levels, equal to Python's, nesting bounded. Permissions of written files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.cli.running import write_arrays
from hidet_dist.export.write import replacing
from hidet_dist.files import json_text, parse_json, write_text
from hidet_dist.limits import MOST_NESTED

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(), of, max_size=3))


@given(VALUES, st.integers(0, 4))
def test_it_is_the_same_value(value: object, levels: int) -> None:
    assert json.loads(json_text(value, levels)) == value


def test_deeper_levels_are_on_one_line() -> None:
    value = {"mesh": "4", "operators": [{"name": "a", "specs": [1, 2]}, {"name": "b", "specs": []}]}
    assert json_text(value, 2).splitlines() == [
        "{",
        ' "mesh": "4",',
        ' "operators": [',
        '  {"name": "a", "specs": [1, 2]},',
        '  {"name": "b", "specs": []}',
        " ]",
        "}",
    ]


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"]\\"":'])
def test_texts_nested_too_deeply_are_refused_before_they_are_parsed(opening: str) -> None:
    closing = "".join("}" if bracket == "{" else "]" for bracket in reversed(opening) if bracket in "[{")
    for levels in (MOST_NESTED + 1, 1_000_000):
        with pytest.raises(ValueError, match="nested"):
            parse_json(opening * levels)
        with pytest.raises(ValueError, match="nested"):
            parse_json((opening * levels + "1" + closing * levels).encode())


@pytest.mark.parametrize("part", ["0", "[]", "{}", '""', '{"a":0}'])
def test_values_are_counted_before_they_are_parsed(part: str) -> None:
    assert len(parse_json(f"[{','.join([part] * 100)}]", 400)) == 100
    with pytest.raises(ValueError, match="more than 100 values"):
        parse_json(f"[{','.join([part] * 101)}]", 100)
    assert parse_json(json.dumps([",[{:" * 1000]), 3) == [",[{:" * 1000]


def test_a_string_that_never_ends_is_read_once() -> None:
    with pytest.raises(ValueError, match="Unterminated string"):
        parse_json('"' + '\\"' * 10**6 + "[" * 300)


def test_brackets_in_strings_and_beside_one_another_are_not_nested() -> None:
    deep = json.loads("[" * MOST_NESTED + "]" * MOST_NESTED)
    for value in (
        deep,
        "[" * 10 * MOST_NESTED,
        ['"[\\' * MOST_NESTED, {"[{" * MOST_NESTED: 1}],
        [[]] * 5 * MOST_NESTED,
    ):
        assert parse_json(json.dumps(value)) == value


@pytest.fixture(params=[0o077, 0o027, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_written_files_and_folders_have_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    write_text(tmp_path / "plan.json", "{}")
    write_arrays(tmp_path / "results.npz", {"y": np.zeros(2)})
    with replacing(tmp_path / "artifacts") as folder:
        write_text(folder / "manifest.json", "{}")
    written = sorted(tmp_path.rglob("*"))
    assert [path.name for path in written] == ["artifacts", "manifest.json", "plan.json", "results.npz"]
    for path in written:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="not a regular file"):
            write_text(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
