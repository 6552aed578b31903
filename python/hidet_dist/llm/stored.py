"""Language models that were built: a folder with artifacts, a tokenizer, and the sizes of a step.

::

    language-model.json     the name, the sizes, an encoder's pooling, and the identity of the artifacts; written last
    tokenizer/              the tokenizer, as transformers stores it
    artifacts/              the artifacts of the program that computes a step
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.artifacts.opened import OpenedArtifacts
from hidet_dist.codec import decode, encode_with_format, of_format
from hidet_dist.errors import ArtifactError, SpecError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_CONFIGURATION_BYTES
from hidet_dist.llm.confined import Confined
from hidet_dist.llm.pooling import Pooling
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.tokenizer import CheckpointTokenizer

FORMAT = 2
_FILE = "language-model.json"
_ARTIFACTS = "artifacts"
_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class _Description:
    """What the file says of a model; ``artifacts`` is the identity of their manifest."""

    name: str
    artifacts: str
    sizes: StepSizes
    pooling: Pooling | None


@dataclass(frozen=True)
class StoredModel:
    """A language model that was built.

    Attributes
    ----------
    folder: Path
        The folder.
    name: str
        The name of the model.
    sizes: StepSizes
        The sizes of a step.
    manifest: Manifest
        The manifest of the artifacts.
    pooling: Pooling, optional
        For an encoder, how the vectors of a text's tokens become one; None for a model that generates texts.
    """

    folder: Path
    name: str
    sizes: StepSizes
    manifest: Manifest
    pooling: Pooling | None = None

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Whether a folder has a language model that was built."""
        return (Path(folder) / _FILE).is_file()

    @staticmethod
    def artifacts_in(folder: Path) -> Path:
        """Return the folder of the artifacts."""
        return folder / _ARTIFACTS

    @classmethod
    def write(
        cls,
        folder: Path,
        name: str,
        sizes: StepSizes,
        tokenizer: CheckpointTokenizer,
        pooling: Pooling | None = None,
    ) -> None:
        """Write what a folder with artifacts lacks of a language model."""
        (folder / _TOKENIZER).mkdir()
        tokenizer.save(folder / _TOKENIZER)
        identity = Manifest.load(cls.artifacts_in(folder)).identity
        description = _Description(name, identity, sizes, pooling)
        write_text(folder / _FILE, json.dumps(encode_with_format(description, FORMAT), indent=1))

    @classmethod
    def open(cls, folder: str | Path) -> StoredModel:
        """Read what a folder says of its model.

        Raises
        ------
        ArtifactError
            When it has no language model, or a malformed one, or one of another version.
        """
        folder = Path(folder)
        file = folder / _FILE
        try:
            fields = of_format(parse_json(read_text(file, MOST_CONFIGURATION_BYTES)), FORMAT)
            described = decode(_Description, fields, "the description")
            if described.pooling is not None:
                described.pooling.check()
        except (OSError, ValueError, SpecError) as error:
            said = str(error).rstrip(".")
            raise ArtifactError(f"{file} is no description of a language model: {said}. Build it again.") from error
        manifest = Manifest.load(cls.artifacts_in(folder))
        if manifest.identity != described.artifacts:
            raise ArtifactError(f"{folder} has artifacts that were built for another model. Build it again.")
        return cls(folder, described.name, described.sizes, manifest, described.pooling)

    @property
    def artifacts(self) -> Path:
        """The folder of the artifacts."""
        return self.artifacts_in(self.folder)

    @contextmanager
    def verifying(self, rank: int) -> Iterator[OpenedArtifacts | None]:
        """While the block runs, have the artifacts open, and verify a rank's files in other threads.

        None where they cannot be opened, which loading them then says, to all ranks.
        """
        with ExitStack() as stack:
            opened: OpenedArtifacts | None = None
            with suppress(ArtifactError, ValueError):  # a file is missing, or there is no such rank
                made = stack.enter_context(OpenedArtifacts(self.artifacts))
                made.start_to_verify(made.manifest.files_of(rank))
                opened = made
            yield opened

    @staticmethod
    def tokenizer_in(folder: Path, process: Confined | None = None) -> CheckpointTokenizer:
        """Read the tokenizer of a folder, in a process of :func:`hidet_dist.llm.tokenizer.tokenizer_process`.

        Raises
        ------
        ConfigError
            When it is malformed.
        """
        return CheckpointTokenizer.of_folder(folder / _TOKENIZER, process)
