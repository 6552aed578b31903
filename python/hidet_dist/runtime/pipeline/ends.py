"""The ends of a rank's messages in one micro-batch, which depend on the sizes of its symbolic dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hidet_dist.artifacts.manifest import ProgramManifest, TensorSignature
from hidet_dist.runtime.pipeline.arrivals import Arrival
from hidet_dist.runtime.pipeline.exchange import Route
from hidet_dist.runtime.pipeline.messages import Crossing, Inlet, Outlet
from hidet_dist.spec import TensorShardSpec
from hidet_dist.transfer import MeshLayout, Transfer, plan_transfer

_MOST_SIZES = 256  # the number of combinations of sizes whose ends are kept


@dataclass(frozen=True)
class Ends:
    """A rank's ends of the messages of one micro-batch, each in the order that all ranks share.

    Attributes
    ----------
    arrivals: those of the stage's inputs that earlier stages compute.
    outlets: those of the stage's outputs that later stages read, with their numbers in the stage.
    routes: those of the graph's outputs that are returned on ranks of other stages.
    """

    arrivals: tuple[Arrival, ...]
    outlets: tuple[tuple[int, Outlet], ...]
    routes: tuple[Route, ...]


class RankEnds:
    """The ends of one rank's messages, at any sizes of symbolic dims.

    Parameters
    ----------
    manifest: ProgramManifest
        The manifest of the program, with a pipeline.
    rank: int
        The rank, among those of all stages.
    """

    def __init__(self, manifest: ProgramManifest, rank: int):
        assert manifest.pipeline is not None
        self._manifest, self._pipeline = manifest, manifest.pipeline
        self._number = manifest.stage_of(rank)
        self._group_rank = manifest.ranks_of(self._number).index(rank)
        self._known: dict[tuple[int, ...], Ends] = {}

    def at(self, sizes: Mapping[str, int]) -> Ends:
        """Return the ends in a micro-batch with these whole sizes of symbolic dims."""
        key = tuple(sizes.values())
        if key not in self._known:
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            self._known[key] = self._ends(sizes)
        return self._known[key]

    def _ends(self, sizes: Mapping[str, int]) -> Ends:
        arrivals: list[Arrival] = []
        outlets: list[tuple[int, Outlet]] = []
        for boundary in self._pipeline.boundaries:
            source = boundary.source
            for reader in boundary.readers:
                if self._number == source.stage:
                    outlet = self._outlet(source.number, reader.stage, reader.number, sizes)
                    outlets.append((source.number, outlet))
                if self._number == reader.stage:
                    inlet = self._inlet(source.stage, source.number, reader.number, sizes)
                    arrivals.append(Arrival(source.stage, reader.number, inlet))
        return Ends(tuple(arrivals), tuple(outlets), tuple(self._routes(sizes)))

    def _routes(self, sizes: Mapping[str, int]) -> list[Route]:
        routes = []
        for place, y in enumerate(self._pipeline.outputs):
            source = y.source
            for target in range(len(self._pipeline.stages)):
                if target == source.stage or not self._pipeline.gives_results(target):
                    continue
                if self._number == source.stage:
                    routes.append(Route(place, self._outlet(source.number, target, None, sizes), None))
                elif self._number == target:
                    routes.append(Route(place, None, self._inlet(source.stage, source.number, None, sizes)))
        return routes

    def _transfer(
        self, source: int, output: int, target: int, number: int | None, sizes: Mapping[str, int]
    ) -> tuple[Transfer, str]:
        """Plan the transfer of an output to another stage's input ``number``, or replicated; also return its dtype."""
        stages = self._manifest.stages
        y = stages[source].outputs[output]
        shape = y.whole_at(sizes)
        replicated = TensorShardSpec.replicated(len(shape))
        spec = replicated if number is None else TensorShardSpec.parse(stages[target].inputs[number].spec)
        layouts = (
            MeshLayout(stages[source].mesh, TensorShardSpec.parse(y.spec)),
            MeshLayout(stages[target].mesh, spec),
        )
        return plan_transfer(shape, *layouts), dtype_name(y)

    def _outlet(self, output: int, target: int, number: int | None, sizes: Mapping[str, int]) -> Outlet:
        transfer, dtype = self._transfer(self._number, output, target, number, sizes)
        return Outlet(Crossing(transfer, self._group_rank, self._manifest.ranks_of(target), dtype))

    def _inlet(self, source: int, output: int, number: int | None, sizes: Mapping[str, int]) -> Inlet:
        transfer, dtype = self._transfer(source, output, self._number, number, sizes)
        return Inlet(Crossing(transfer, self._group_rank, self._manifest.ranks_of(source), dtype))


def dtype_name(signature: TensorSignature) -> str:
    """Return the name of a tensor's dtype in NumPy."""
    return "bool" if signature.dtype == "boolean" else signature.dtype
