"""hidet's example programs as tests of pytest: each is run as a program, in a folder of its own."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.hidet_suite.stand_ins import small_data

NEEDS_GPUS = {"examples/distributed/test.py": "it calls NCCL's collectives in processes that each have a GPU"}


class ExampleFile(pytest.File):
    """The file of an example program."""

    def collect(self) -> Iterator[Example]:
        """The program itself."""
        yield Example.from_parent(self, name=self.path.stem)


class Example(pytest.Item):
    """An example program, which compares its results with nothing."""

    def runtest(self) -> None:
        """Run the program."""
        relative = self.path.relative_to(self.config.rootpath).as_posix()
        if relative in NEEDS_GPUS:
            pytest.skip(NEEDS_GPUS[relative])
        with mock.patch.object(sys, "argv", [str(self.path)]), small_data():
            runpy.run_path(str(self.path), run_name="__main__")

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the program is, and its name."""
        return self.path, 0, self.nodeid


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ExampleFile | None:
    """Take each program below ``examples``."""
    is_example = "examples" in file_path.relative_to(parent.config.rootpath).parts[:1]
    return ExampleFile.from_parent(parent, path=file_path) if is_example and file_path.suffix == ".py" else None
