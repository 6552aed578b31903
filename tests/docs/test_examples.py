"""The examples, run as their readers run them, and what the README says of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "examples" / "first.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_of(text: str) -> str:
    """A module without its docstring."""
    return text.partition('"""\n')[2].strip() if text.startswith('"""') else text.strip()


def test_the_first_example_runs_and_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported hidet already: that takes seconds. Its ranks are processes."""
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONUNBUFFERED", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FIRST), run_name="__main__")
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err
    differences = [float(figure) for figure in re.findall(r"from NumPy is (\S+)", printed.out)]
    assert len(differences) == 2
    assert all(difference < 1e-5 for difference in differences)
    (shown,) = re.findall(r"^```\n(shard.*?)^```$", README, re.MULTILINE | re.DOTALL)

    def without_figures(text: str) -> list[str]:
        return sorted(re.sub(r"NumPy is .*", "", line) for line in text.splitlines())

    assert without_figures(printed.out) == without_figures(shown)


def test_a_plan_for_gpus_is_made_without_them(capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "plan_for_gpus.py"), run_name="__main__")
    said = capfd.readouterr().out
    # As Megatron-LM does it: the first two by columns, the last by rows, and one reduction.
    for line in ('shard("gate", dim=1)', 'shard("up", dim=1)', 'shard("down", dim=0)', 'sync("down", '):
        assert line in said


def test_the_first_example_has_at_most_twenty_lines():
    assert len([line for line in FIRST.read_text(encoding="utf-8").splitlines() if line]) <= 20


def test_the_readme_shows_the_first_example_as_it_is():
    (shown,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert shown.strip() == code_of(FIRST.read_text(encoding="utf-8"))


def test_the_readme_begins_with_the_commands_that_set_everything_up_and_is_short():
    assert len(README.splitlines()) <= 120
    assert README.index("make demo") < README.index("make test") < README.index("## Installing")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    pages = (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    named = {target for page in pages for target in re.findall(r"`?make ([\w-]+)", page)}
    assert {"demo", "test", "docs"} <= named <= targets
