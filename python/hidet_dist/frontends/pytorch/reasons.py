"""What a failed ``torch.export`` says to the person who wrote the module."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_CONSTANT = re.compile(r"You marked (.+?) as dynamic but your code specialized it to be a constant \((\d+)\)")
_FOREIGN = re.compile(r"Found <class '(.+?)'> in output, which is not a known type")
_GUARD = re.compile(
    r"Not all values of (\w+) = (.+?) in the specified range(?: .+?)? satisfy the generated guard "
    r"(.+?)(?:\.Special.*|\.)?$",
    re.MULTILINE,
)


def reason_of(error: Exception) -> str:
    """Return PyTorch's reason in a line, with the place in the module's code, and advice where there is some.

    Parameters
    ----------
    error: Exception
        What ``torch.export`` raised, or what the module raised in it.
    """
    text = str(error).strip()
    if found := _CONSTANT.findall(text):
        return "; ".join(_of_constant(name, int(size)) for name, size in found)
    if found := _FOREIGN.findall(text):
        return (
            f"it returns a {found[0]}, and results are tensors, numbers, text, and containers of these. A module of "
            "transformers returns no cache with the argument use_cache=False."
        )
    reason = _reason_in(text)
    if not isinstance(error, UserError):
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    if place := _place_of(error):
        reason = f"{reason} ({place})"
    if isinstance(error, GuardOnDataDependentSymNode):
        reason += (
            "\nControl flow and sizes must not depend on the values of tensors, as in `if x.sum() > 0`, `x.item()` or "
            "`x.tolist()`: compute them before the call, or with torch.where."
        )
    return reason


def _of_constant(name: str, size: int) -> str:
    """Say why a dim that is declared symbolic is a constant."""
    if size < 2:
        return (
            f"the symbolic dim {name} has size {size} in the example inputs, which torch.export takes for a constant: "
            "give it 2 or more there. The graph takes other sizes all the same"
        )
    return (
        f"the module makes the symbolic dim {name} the number {size} of the example inputs, as `float(size)`, "
        "`math.sqrt(size)`, or a reshape or comparison with a number do: compute with the size itself, as in "
        "`size ** 0.5`, or leave the dim out of dynamic_shapes"
    )


def _reason_in(text: str) -> str:
    """Extract the reason from a message of PyTorch, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    if found := _GUARD.findall(text):
        name, source, guard = found[0]
        range_of = next((line for line in lines if line.startswith(f"{name} = Dim(")), None)
        other = f"declare other sizes, as by `Dim({name!r}, min=...)`, or leave {name} out of dynamic_shapes"
        advice = f"declare `{range_of}`" if range_of else other
        return f"the module takes sizes {name} with `{guard.replace(source, name)}` alone: {advice}"
    if lines[0].startswith("Constraints violated") and len(lines) > 1:
        return lines[1].removeprefix("- ")
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _place_of(error: Exception) -> str:
    """Return the file and line of the module's innermost code that led to an error; empty if that is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    known = [frame for frame in frames if _is_of_module(Path(frame.filename))]
    return f"{known[-1].filename.rpartition('/')[2]}:{known[-1].lineno}" if known else ""


def _is_of_module(file: Path) -> bool:
    """Whether code is neither PyTorch's, nor Python's, nor of this package."""
    if not file.is_file() or Path(__file__).parent in file.parents or Path(torch.__file__).parent in file.parents:
        return False
    return Path(traceback.__file__).parent not in file.parents or "site-packages" in file.parts
