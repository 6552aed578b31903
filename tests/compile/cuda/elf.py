"""The device code and the dependencies of a shared library, read without tools of CUDA."""

import re
import struct
import subprocess

_FATBINARY = 0xBA55ED50
_ELF_ENTRY = 2  # of a fat binary: code for one architecture; 1 is PTX


def _section(data, wanted):
    """The content of a section of a 64-bit ELF file; empty where there is none."""
    (headers,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, headers + i * size) for i in range(count)]
    for section in sections:
        begin = sections[names][4] + section[0]
        if data[begin : data.index(b"\0", begin)] == wanted:
            return data[section[4] : section[4] + section[5]]
    return b""


def architectures(library):
    """The architectures that a library has device code for, such as {90}, from its fat binaries."""
    data = _section(library.read_bytes(), b".nv_fatbin")
    found, at = set(), 0
    while at < len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        assert magic == _FATBINARY
        end, entry = at + header + size, at + header
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            if kind == _ELF_ENTRY:
                found.add(struct.unpack_from("<I", data, entry + 28)[0])
            entry += entry_header + entry_size
        at = (end + 7) // 8 * 8
    return found


def needed(library):
    """The libraries that the loader loads along."""
    text = subprocess.run(["readelf", "-dW", str(library)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def imported(library):
    """The functions that are looked for in other libraries."""
    text = subprocess.run(["readelf", "--dyn-syms", "-W", str(library)], capture_output=True, text=True, check=True)
    rows = (line.split() for line in text.stdout.splitlines())
    return {row[7].partition("@")[0] for row in rows if len(row) > 7 and row[6] == "UND"}
