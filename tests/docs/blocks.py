"""Code blocks of Markdown pages, and running them in order as a reader would."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(
    r"^(?P<skip><!-- not run: [^\n]+ -->\n)?```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'title="(?P<name>[^"]+)"')
_TIMEOUT_SECONDS = 240


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is the content of, its text, and its line in the page."""

    language: str
    file: str | None
    text: str
    line: int
    run: bool


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = _TITLE.search(rest)
        line = text.count("\n", 0, match.start("info")) + 1
        found.append(Block(language, title and title["name"], match["body"], line, match["skip"] is None))
    return found


def run_page(page: Path, folder: Path) -> None:
    """Run the blocks of a page in the current directory, ``folder``, and compare what they print with what it shows.

    Python blocks share their names. A block with a title is written to that file. The lines of a console block that
    begin with ``$`` are run, and print the block's other lines, in any order, where there are any. A text block behind
    a Python block is what that prints.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if not block.run:
                continue
            if block.file is not None:
                (folder / block.file).write_text(block.text, encoding="utf-8")
                continue
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, names)
            printed = output.getvalue()
        elif block.language == "text" and block.run and printed is not None:
            assert printed == block.text, f"{where} shows\n{block.text}but what is printed is\n{printed}"
        elif block.language == "console" and block.run:
            _run_commands(block, folder, where)
        if block.language != "python":
            printed = None


def _run_commands(block: Block, folder: Path, where: str) -> None:
    lines = block.text.splitlines()
    # Unbuffered, lines of several ranks could mix.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    output: list[str] = []
    for line in lines:
        if line.startswith("$ "):
            done = subprocess.run(
                shlex.split(line[2:]),
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
            assert done.returncode == 0, f"{where}: {line[2:]}\n{done.stdout}{done.stderr}"
            output += done.stdout.splitlines()
    expected = [line for line in lines if not line.startswith("$ ")]
    if expected:
        assert sorted(output) == sorted(expected), f"{where} prints {output}"
