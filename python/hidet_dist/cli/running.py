"""``hidet-dist run``: one run of artifacts by ranks on this machine, with inputs and outputs in .npz files.

Each rank runs this module as a program: ``python -m hidet_dist.cli.running DIR PROGRAM INPUT OUTPUT ERRORS [TRACES]``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hidet_dist import launch
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.checks import shown
from hidet_dist.cli.arrays import NpyHeader, opened_arrays, write_arrays
from hidet_dist.cli.request import check_destination
from hidet_dist.errors import ArtifactError, ConfigError, HidetDistError, InputError
from hidet_dist.runtime.partition import load_partition
from hidet_dist.runtime.profile import merge_traces
from hidet_dist.spec import Plan, TensorPlan

TOLD = 3
"""The exit status of a rank that has written its error to a file."""
_RELAYED = 256  # characters of an error that other ranks repeat, at least
_BFLOAT16 = "bfloat16"
_AS_BFLOAT16 = (np.dtype("float32"), np.dtype("V2"))
"""The dtypes of arrays for bfloat16: numbers, which are rounded to it, or bytes, as arrays of ml_dtypes are saved."""


@dataclass(frozen=True)
class _Input:
    """An input of artifacts.

    Attributes
    ----------
    names: the names that it may have: the model's, if any, and the plan's.
    dtype: its dtype, by NumPy's name or bfloat16; None if no stage reads it.
    shape: its shape, as far as it is known; None for dims that a call decides.
    """

    names: Sequence[str]
    dtype: str | None
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, number: int, label: str, shards: Sequence[TensorPlan], whole: bool) -> _Input:
        """Describe an input that tensors of stages take, ``whole`` or in micro-batches."""
        names = [name for name in (label, f"x{number}") if name]
        if not shards:
            return cls(names, None, ())
        x = shards[0]
        shape = tuple(extent if whole and isinstance(extent, int) else None for extent in x.written or x.shape)
        return cls(names, "bool" if x.dtype == "boolean" else x.dtype, shape)

    def check(self, found: NpyHeader, what: str) -> None:
        """Raise InputError for an array of another dtype or shape; ``what`` begins the sentence."""
        if self.dtype is None:
            return
        if found.dtype.name != self.dtype and (self.dtype != _BFLOAT16 or found.dtype not in _AS_BFLOAT16):
            written = "bfloat16, which a .npz file has as float32" if self.dtype == _BFLOAT16 else self.dtype
            raise InputError(f"{what} of the dtype {found.dtype}; the program takes {written}.")
        fits = len(found.shape) == len(self.shape)
        if not fits or any(extent not in (None, size) for size, extent in zip(found.shape, self.shape, strict=True)):
            wanted = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
            raise InputError(f"{what} of the shape {list(found.shape)}; the program takes [{wanted}].")


@dataclass(frozen=True)
class _Call:
    """A call of a program of artifacts: the names of inputs and outputs, and the ranks.

    Attributes
    ----------
    program: the name of the program.
    inputs: the inputs.
    output_names: the name of each output.
    output_dtypes: the dtype of each output.
    ranks: the number of ranks.
    result_rank: the lowest rank that returns the outputs.
    """

    program: str
    inputs: Sequence[_Input]
    output_names: Sequence[str]
    output_dtypes: Sequence[str]
    ranks: int
    result_rank: int


def run(
    folder: Path,
    program: str | None,
    ranks: int | None,
    given: Path,
    output: Path | None,
    profile: Path | None,
    as_json: bool,
) -> int:
    """Run artifacts on this machine, and print a summary of the outputs.

    Parameters
    ----------
    folder: Path
        The artifact folder.
    program: str, optional
        The name of the program, which artifacts of one program need not be given.
    ranks: int, optional
        The number of ranks, which must be that of the artifacts.
    given: Path
        The .npz file of the inputs. Its arrays have the names of the model's inputs, or those of the plan (``x0`` and
        so on).
    output: Path, optional
        The .npz file to write the outputs to.
    profile: Path, optional
        The file to write the trace of one more call to.
    as_json: bool
        Whether to print JSON.

    Returns
    -------
    int
        The exit status of the ranks.

    Raises
    ------
    ArtifactError
        When the folder has no artifacts, or the program has sharded inputs or outputs.
    ConfigError
        When there is no such program, the artifacts are for another number of ranks, or ``given`` cannot be read.
    InputError
        When ``given`` lacks an input, has another array, or has an input of another dtype or shape.
    HidetDistError
        When ranks fail: their errors, each once.
    """
    call = _call(folder, program)
    if ranks is not None and ranks != call.ranks:
        raise ConfigError(f"{folder} is for {call.ranks} ranks; run it with -n {call.ranks}, or without -n.")
    for path in (output, profile):
        check_destination(path)
    _inputs(given, call)
    with tempfile.TemporaryDirectory(prefix="hidet-dist-run-") as scratch:
        result, errors, traces = (Path(scratch) / name for name in ("outputs.npz", "errors", "traces"))
        errors.mkdir()
        module = ["-m", "hidet_dist.cli.running", str(folder), call.program, str(given), str(result), str(errors)]
        arguments = ["-n", str(call.ranks), *module]
        if profile is not None:
            traces.mkdir()
            arguments.append(str(traces))
        status = launch.main(arguments, "hidet-dist run", TOLD)
        if told := _told(errors):
            raise HidetDistError("; ".join(told))
        if status:
            return status
        with opened_arrays(result) as results:
            arrays = {name: results.read(name) for name in results.names}
        if profile is not None:
            merge_traces(sorted(traces.iterdir()), profile)
    if output is not None:
        write_arrays(output, arrays)
    if as_json:
        written = {"output": output and str(output), "profile": profile and str(profile)}
        print(json.dumps({"outputs": {name: _summary(array) for name, array in arrays.items()}, **written}, indent=1))
        return 0
    for name, array in arrays.items():
        shape, least, most = ", ".join(map(str, array.shape)), float(array.min()), float(array.max())
        print(f"{name}: {array.dtype}[{shape}], from {least:g} to {most:g}")
    for path in filter(None, (output, profile)):
        print(f"Written to {path}.")
    return 0


def _told(folder: Path) -> list[str]:
    """List the ranks' errors by rank, without those that only repeat another rank's."""
    texts = [file.read_text() for file in sorted(folder.iterdir(), key=lambda file: int(file.name))]
    return [text for text in dict.fromkeys(texts) if not any(one[:_RELAYED] in text for one in texts if one != text)]


def _summary(array: np.ndarray) -> dict[str, Any]:
    """Return the dtype, shape and range of an array. A bound that is not finite is None, as JSON has no such number."""
    least, most = (float(value) if np.isfinite(value) else None for value in (array.min(), array.max()))
    return {"dtype": str(array.dtype), "shape": list(array.shape), "least": least, "most": most}


def _call(folder: Path, name: str | None) -> _Call:
    """Describe a call of a program. Raises ArtifactError for artifacts that :func:`run` does not support."""
    manifest = Manifest.load(folder)
    program = manifest.program(name)
    plan, pipeline = Plan.load(folder / manifest.folder_of(program) / "plan.json"), program.pipeline
    if len(plan.stages) != len(program.stages):
        raise ArtifactError(f"{folder} has a plan of {len(plan.stages)} stages, not of {len(program.stages)}.")
    if pipeline is None:
        inputs = [[x] for x in plan.stages[0].inputs]
        outputs, result_rank = list(plan.stages[0].outputs), 0
    else:
        inputs = [[plan.stages[port.stage].inputs[port.number] for port in x.readers] for x in pipeline.inputs]
        outputs = [plan.stages[y.source.stage].outputs[y.source.number] for y in pipeline.outputs]
        stages = range(len(program.stages))
        result_rank = next(program.ranks_of(stage).start for stage in stages if pipeline.gives_results(stage))
    if not all(x.spec.is_replicated for x in (*itertools.chain.from_iterable(inputs), *outputs)):
        raise ArtifactError(f"{folder} has sharded inputs or outputs; load it in a program of ranks instead.")
    interface = program.stages[0].interface
    input_names = [next((x.label for x in shards if x.label), "") for shards in inputs]
    output_names = [y.label for y in outputs]
    if interface is not None:
        input_names, output_names = list(interface.input_names), list(interface.output_names)
    return _Call(
        program.name,
        [
            _Input.of(number, label, shards, whole=pipeline is None)
            for number, (label, shards) in enumerate(zip(input_names, inputs, strict=True))
        ],
        [name or f"y{number}" for number, name in enumerate(output_names)],
        [y.dtype for y in outputs],
        manifest.world_size,
        result_rank,
    )


def _inputs(path: Path, call: _Call) -> list[Any]:
    """Read the inputs from a .npz file; those of bfloat16, which NumPy lacks, become tensors of PyTorch.

    If an output is of bfloat16, all become such tensors, since a program's outputs are of its inputs' library. All
    arrays are checked before one is read.

    Raises
    ------
    ConfigError
        When the file cannot be read.
    InputError
        For missing and other arrays, and arrays of another dtype or shape.
    """
    with opened_arrays(path) as arrays:
        expected = ", ".join(x.names[0] for x in call.inputs)
        found = []
        for x in call.inputs:
            name = next((name for name in x.names if name in arrays.names), None)
            if name is None:
                raise InputError(f"{path} has no array {x.names[0]!r}; the inputs are {expected}.")
            found.append(name)
        for name in arrays.names:
            if name not in found:
                raise InputError(f"{path} has the array {shown(name)}; the inputs are {expected}.")
        for x, name in zip(call.inputs, found, strict=True):
            x.check(arrays.header(name), f"{path} has the array {shown(name)}")
        ordered = [arrays.read(name) for name in found]
    if _BFLOAT16 not in (*(x.dtype for x in call.inputs), *call.output_dtypes):
        return ordered
    return [_tensor(array, x.dtype or array.dtype.name) for array, x in zip(ordered, call.inputs, strict=True)]


def _tensor(x: np.ndarray, dtype: str) -> Any:
    """Convert an array to a tensor of PyTorch of a dtype."""
    import torch

    if x.dtype.kind == "V":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x).to(getattr(torch, dtype))


def _array(y: Any) -> np.ndarray:
    """Convert an output to an array; bfloat16 becomes float32."""
    return np.asarray(y.float() if str(y.dtype) == f"torch.{_BFLOAT16}" else y)


def main(folder: str, program: str, given: str, output: str, errors: str, traces: str | None = None) -> int:
    """Run one rank: write the outputs if it is the result rank, and a trace of one more call if ``traces`` is given.

    An error of the package goes to a file in the folder ``errors``; the exit status is then :data:`TOLD`.
    """
    try:
        call = _call(Path(folder), program)
        with load_partition(folder) as partition:
            arrays, model = _inputs(Path(given), call), partition.program(program)
            results = model.run(arrays)
            if model.rank == call.result_rank:
                write_arrays(Path(output), dict(zip(call.output_names, map(_array, results), strict=True)))
            if traces is not None:
                model.profile(*arrays).save(Path(traces) / f"{model.rank}.json")
    except HidetDistError as error:
        (Path(errors) / os.environ.get("RANK", "0")).write_text(" ".join(str(error).split()))
        return TOLD
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
