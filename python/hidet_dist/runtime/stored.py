"""Positions of tensors in a rank's files, whose headers must equal those that a build writes for the layouts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from hidet_dist.artifacts.opened import VerifiedFile
from hidet_dist.errors import ArtifactError, WeightsError
from hidet_dist.limits import MOST_HEADER_BYTES
from hidet_dist.runtime.recycling import ALIGNMENT
from hidet_dist.weights import header
from hidet_dist.weights.header import LocatedTensor, StoredLayout


def places_in(file: VerifiedFile, layouts: Mapping[str, StoredLayout]) -> dict[str, LocatedTensor]:
    """Locate each tensor, in bytes, in a safetensors file that holds exactly these tensors.

    The layouts determine the header and the size of the file. The positions are computed from them, and the file's
    header is only compared with the expected one.

    Raises
    ------
    ArtifactError
        When the file's size or header differs; the message names a tensor that does.
    """
    try:
        head, places = header.arrange(layouts, ALIGNMENT)
    except WeightsError as error:
        raise ArtifactError(f"{file.path} is not a file of a build: {error} Build the artifacts again.") from error
    end = max((place.begin + place.nbytes for place in places.values()), default=len(head))
    if os.pread(file.descriptor, len(head), 0) != head or file.nbytes != end:
        raise ArtifactError(f"{file.path} does not fit the program: {_difference(file, places)}. Build it again.")
    return {name: places[name] for name in layouts}


def check_coordinate(file: VerifiedFile, place: LocatedTensor, coordinate: Sequence[int]) -> None:
    """Raise ArtifactError if the coordinate in a rank's file differs from the rank's."""
    data = os.pread(file.descriptor, place.nbytes, place.begin)
    stored = tuple(np.frombuffer(data, np.int32).tolist())
    if stored != tuple(coordinate):
        raise ArtifactError(
            f"{file.path} belongs to the rank at {stored}, not to the one at {tuple(coordinate)}. Build the artifacts "
            "again."
        )


def _difference(file: VerifiedFile, expected: Mapping[str, LocatedTensor]) -> str:
    length = int.from_bytes(os.pread(file.descriptor, header.LENGTH_BYTES, 0), "little")
    try:
        text = os.pread(file.descriptor, min(length, MOST_HEADER_BYTES), header.LENGTH_BYTES)
        places = header.parse(text, file.nbytes)
    except WeightsError as error:
        return str(error).rstrip(".")
    for name, place in expected.items():
        if name not in places:
            return f"it lacks {name!r}"
        if places[name] != place:
            return f"it has {name!r} as {_text(places[name])}, not as {_text(place)}"
    others = ", ".join(repr(name) for name in places if name not in expected)
    return f"it also has {others}" if others else "its header is not formatted as builds format it"


def _text(place: LocatedTensor) -> str:
    return f"{place.dtype}{list(place.shape)} at byte {place.begin}"
