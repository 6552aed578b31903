"""A third target: processors of this machine under another name, with an option and an architecture of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.machine import Device
from hidet_dist.options.option import one_of, option
from hidet_dist.targets import TARGETS, Target


@dataclass(frozen=True)
class FakeOptions:
    """The options of this target."""

    instructions: str = option(
        "x86-64-v2", "str", "The level of instructions.", one_of(("x86-64", "x86-64-v2", "x86-64-v3"))
    )


@dataclass(frozen=True)
class FakeTarget(CpuTarget):
    """The backend: the CPU's, at the level that the option gives."""

    record: ClassVar[Target] = TARGETS["fake"]
    archs: ClassVar[Sequence[str]] = ("fake-1",)
    options: ClassVar[type] = FakeOptions

    @classmethod
    def configured(cls, arch: str | None, options: Any, device: Device) -> FakeTarget:
        return cls(options.instructions)
