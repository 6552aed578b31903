"""Loading of one rank's parts of the programs of artifacts into the memory of its device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hidet_dist.artifacts.coherence import check_description
from hidet_dist.artifacts.manifest import COORDINATE, StageManifest, StateSignature, weights_file
from hidet_dist.artifacts.opened import OpenedArtifacts
from hidet_dist.errors import ArtifactError
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.device import RankDevice, RankPart
from hidet_dist.runtime.launcher import Launcher
from hidet_dist.runtime.libraries import Libraries, hidet_runtime, load_needed
from hidet_dist.runtime.processor import check_features
from hidet_dist.runtime.program import StageProgram
from hidet_dist.runtime.states import States
from hidet_dist.runtime.stored import check_coordinate, places_in
from hidet_dist.runtime.targets import device_kind
from hidet_dist.weights.header import StoredLayout

_sizes_lock = threading.Lock()  # hidet's runtime has one table of symbolic dims' sizes


def _forked() -> None:
    """Make a new lock in a forked child: the thread that holds the old one may not exist there."""
    global _sizes_lock  # noqa: PLW0603
    _sizes_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _lock_of(stages: Iterable[StageManifest]) -> AbstractContextManager[Any]:
    return _sizes_lock if any(stage.symbols or stage.parts for stage in stages) else nullcontext()


class LoadedParts:
    """One rank's parts of all programs of artifacts: libraries, and the weights and states that programs share.

    Parameters
    ----------
    artifacts: OpenedArtifacts
        The folder, with the rank's files verified.
    rank: int
        The rank.

    Attributes
    ----------
    stage_number: int
        The number of the rank's stage, in all programs.
    ranks: range
        The ranks of that stage.
    device: RankDevice
        The rank's device.
    states: States
        The states of all programs.
    parts: list of RankPart
        The part of each program.

    Raises
    ------
    ArtifactError
        When files do not fit one another, or this process's libraries.
    ConfigError
        When this host has no such device.
    """

    def __init__(self, artifacts: OpenedArtifacts, rank: int):
        self._manifest = manifest = artifacts.manifest
        self._folder = artifacts.folder
        first = manifest.programs[0]  # the stages of all programs have the same ranks
        self.stage_number = first.stage_of(rank)
        self.ranks = first.ranks_of(self.stage_number)
        self._group_rank = self.ranks.index(rank)
        self.parts: list[RankPart] = []
        self._libraries = Libraries()
        self._launchers: list[Launcher] = []
        stages = [program.stages[self.stage_number].at(self._group_rank) for program in manifest.programs]
        self.device: RankDevice = device_kind(manifest.target).open(manifest, stages[0], rank)
        self.states = States((), {}, self.device.memory)
        try:
            self._load(artifacts, rank, stages)
        except BaseException:
            self.close()
            raise

    def sizes_lock(self) -> AbstractContextManager[Any]:
        """Return the lock of hidet's table of sizes, if a program has symbolic extents."""
        return _lock_of(part.stage for part in self.parts)

    def choose_candidates(self, communicator: Communicator, give_up: Callable[[str], None]) -> None:
        """Choose the fastest candidate of each kernel, where there are several, together with the stage's ranks.

        ``give_up`` ends the rank's communicators where states are lost meanwhile.
        """
        for part in self.parts:
            with self.sizes_lock(), self.states.aside(give_up):
                build = f"{self._manifest.identity}/{part.stage.folder}"
                self.device.choose_candidates(part, communicator, self._folder.resolve(), build)

    def close(self) -> None:
        """Free the memory, once no work uses it, and unload the libraries."""
        for launcher in self._launchers:
            launcher.close()
        self.states.close()
        self.device.memory.close()
        self._libraries.close()

    def _load(self, artifacts: OpenedArtifacts, rank: int, stages: Sequence[StageManifest]) -> None:
        """Load the libraries of each program, and the weights that all programs share, once."""
        manifest, number, folder, memory = self._manifest, self.stage_number, self._folder, self.device.memory
        check_features(manifest.arch, manifest.cpu_features)
        load_needed((), folder)  # the libraries that every launcher links against
        runtime = hidet_runtime()
        libraries, layouts = [], []
        for place, stage in enumerate(stages):
            library, description = self._libraries.load_launcher(artifacts.take(stage.launcher_file))
            try:
                layouts.append(
                    check_description(manifest, place, number, description, stage.part_sizes(self._group_rank))
                )
            except ValueError as error:
                raise ArtifactError(f"{folder}: {error}. Build the artifacts again.") from error
            libraries.append(library)
        addresses = self._load_weights(artifacts, rank, stages, layouts)
        self.states = States(_states_of(stages, folder), addresses, memory)
        loaded = dict[str, list[int]]()  # equal kernels have one library
        for place, (stage, library) in enumerate(zip(stages, libraries, strict=True)):
            load_needed(stage.libraries, folder)
            for name, candidates in zip(stage.kernel_files(), stage.candidates, strict=True):
                if name not in loaded:
                    loaded[name] = self._libraries.load_kernel(artifacts.take(name), candidates)
            kernels = [loaded[name] for name in stage.kernel_files()]
            own = {**addresses, **self._load_constants(artifacts, stage, layouts[place])}
            names = [state.name for state in stage.states]
            data = [own[name] for name in stage.data]
            launcher = self.device.launcher(library, kernels, data, stage, self.states.addresses(names))
            self._launchers.append(launcher)
            self.states.lend(names, launcher.take_states)
            if not stage.symbols and not stage.parts and launcher.workspaces() != stage.workspace_bytes:
                raise ArtifactError(
                    f"{folder}: programs[{place}].stages[{number}].workspace_bytes is {stage.workspace_bytes}, but the "
                    f"launcher needs {launcher.workspaces()}. Build the artifacts again."
                )
            with _lock_of(stages):
                program = StageProgram(stage, launcher, memory, runtime, stage.part_sizes(self._group_rank))
            self.parts.append(RankPart(stage, launcher, kernels, program))

    def _load_weights(
        self,
        artifacts: OpenedArtifacts,
        rank: int,
        stages: Sequence[StageManifest],
        layouts: Sequence[Mapping[str, StoredLayout]],
    ) -> dict[str, int]:
        """Load the rank's storage, which has each weight once; return the addresses by name."""
        held: dict[str, StoredLayout] = {}
        for place, (stage, of_stage) in enumerate(zip(stages, layouts, strict=True)):
            for name, layout in of_stage.items():
                if name not in stage.constants and held.setdefault(name, layout) != layout:
                    raise ArtifactError(
                        f"{artifacts.folder}: programs[{place}] has {name!r} as {layout}, and another program has it "
                        f"as {held[name]}. Build the artifacts again."
                    )
        file = artifacts.take(weights_file(rank))
        places = places_in(file, held)
        if COORDINATE in places:
            check_coordinate(file, places[COORDINATE], stages[0].mesh.coordinate(self._group_rank))
        return self.device.memory.load(file, places)

    def _load_constants(
        self, artifacts: OpenedArtifacts, stage: StageManifest, layouts: Mapping[str, StoredLayout]
    ) -> dict[str, int]:
        """Load the constants of a program, which all of its ranks have; return their addresses by name."""
        if not stage.constants:
            return {}
        file = artifacts.take(stage.constants_file)
        return self.device.memory.load(file, places_in(file, {name: layouts[name] for name in stage.constants}))


def _states_of(stages: Sequence[StageManifest], folder: Path) -> list[StateSignature]:
    """List the states of a rank's programs, each once. Raises ArtifactError where programs have one in two forms."""
    found: dict[str, StateSignature] = {}
    for place, stage in enumerate(stages):
        for state in stage.states:
            if found.setdefault(state.name, state) != state:
                raise ArtifactError(
                    f"{folder}: programs[{place}] has the state {state.name!r} as {state}, and another program has it "
                    f"as {found[state.name]}. Build the artifacts again."
                )
    return list(found.values())
