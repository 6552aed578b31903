"""Values of options as text, as the command line has them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hidet_dist.errors import ConfigError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SHARES = re.compile(r"^([A-Za-z_]\w*)=(\d{1,9}(?::\d{1,9})+)$")
_DIM = re.compile(r"^([^=\s]+)=(\d{1,18})$")
_DYNAMIC = re.compile(r"^(batch|seq)(?::(\d{1,9}))?$")
_PIN = re.compile(r"^([^=]+)=(.+)$")
_MESH = re.compile(r"^\d{1,9}(?:[x,]\d{1,9})*$")


def parse_bytes(text: str) -> int:
    """Parse an amount of memory, such as ``60GiB`` (2**30 bytes each), ``60GB`` (10**9) or ``1048576``.

    Raises
    ------
    ConfigError
        For other text, and for less than a byte.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size in bytes; write it as 60GiB, 60GB or 1048576.")
    number, unit, binary = match.groups()
    count = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])
    if count < 1:
        raise ConfigError(f"The size {text!r} is less than a byte.")
    return count


def parse_budgets(text: str) -> int | list[int]:
    """Parse an amount of memory, or one for each device, such as ``24GiB,12GiB``. Raises ConfigError."""
    sizes = [parse_bytes(size) for size in text.split(",")]
    return sizes if len(sizes) > 1 else sizes[0]


def parse_mesh(text: str) -> list[int]:
    """Parse the devices along each mesh axis, such as ``8`` or ``2x8``. Raises ConfigError."""
    if not _MESH.match(text):
        raise ConfigError(f"{text!r} is not a mesh; write the devices along each axis, as 8 or 2x8.")
    return [int(size) for size in re.split("[x,]", text)]


def parse_shares(text: str) -> dict[str, list[int]] | str:
    """Parse the shares of mesh axes, such as ``axis0=11:5`` or ``axis0=2:1,axis1=3:1``, or ``auto``.

    Raises ConfigError for any other text.
    """
    if text == "auto":
        return text
    shares: dict[str, list[int]] = {}
    for part in text.split(","):
        match = _SHARES.match(part)
        if match is None or match[1] in shares:
            raise ConfigError(f"{text!r} does not give shares of mesh axes; write them as axis0=11:5, or auto.")
        shares[match[1]] = [int(share) for share in match[2].split(":")]
    return shares


def parse_dims(texts: Iterable[str]) -> dict[str, int]:
    """Parse the sizes of dims, such as ``batch=8``, to a dict by name. Raises ConfigError."""
    dims: dict[str, int] = {}
    for text in texts:
        match = _DIM.match(text)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"{text!r} is not the size of a dim; write it as batch=8.")
        if match[1] in dims:
            raise ConfigError(f"The dim {match[1]} has two sizes, {dims[match[1]]} and {match[2]}; give one of them.")
        dims[match[1]] = int(match[2])
    return dims


def parse_dynamic(texts: Iterable[str]) -> dict[str, int]:
    """Parse symbolic dims, such as ``seq`` or ``batch:8``, to a dict of the number that divides all sizes of each.

    Raises ConfigError.
    """
    dims: dict[str, int] = {}
    for text in texts:
        match = _DYNAMIC.match(text)
        if match is None or match[1] in dims or int(match[2] or 1) < 1:
            raise ConfigError(
                f"{text!r} is not a symbolic dim: give batch or seq, each once, with a number that divides all sizes "
                "if there is one, as batch:8."
            )
        dims[match[1]] = int(match[2] or 1)
    return dims


def parse_pins(texts: Iterable[str]) -> dict[str, str]:
    """Parse pins, such as ``lm_head.weight=(S0, R)``, to a dict by name. Raises ConfigError."""
    pins: dict[str, str] = {}
    for text in texts:
        match = _PIN.match(text)
        if match is None or match[1].strip() in pins:
            raise ConfigError(f"{text!r} is not a pin; write the name of a tensor once, with its spec, as w0=(S0, R).")
        pins[match[1].strip()] = match[2].strip()
    return pins
