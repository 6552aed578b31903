"""``hidet-dist calibrate``: measure the running machine, and write a machine file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hidet_dist.cli.request import check_destination
from hidet_dist.files import parse_json
from hidet_dist.options.texts import parse_mesh
from hidet_dist.progress import report_console


def measure(mesh: str, out: Path, as_json: bool, **options: Any) -> None:
    """Measure this machine as a mesh of processes; ``options`` are those of :func:`hidet_dist.calibration.calibrate`.

    With ``as_json`` the machine file and the relative errors of its figures are printed as JSON, else as tables.

    Raises
    ------
    ConfigError
        When an option is invalid, before anything is measured.
    CalibrationError
        When a rank fails or the time limit is reached.
    """
    shape = parse_mesh(mesh)
    check_destination(out)

    from hidet_dist.calibration import calibrate

    calibration = calibrate(shape, out, **{name: value for name, value in options.items() if value is not None})
    if as_json:
        errors = {"kernels": calibration.kernel_errors(), "collectives": calibration.relative_errors()}
        machine = parse_json(out.read_text(encoding="utf-8"))
        print(json.dumps({"out": str(out), "machine": machine, "relative_errors": errors}, indent=1))
        return
    console = report_console()
    for table in calibration.tables():
        console.print(table)
    console.print(f"Written to {out}: --machine and distributed_config['machine'] take its path.", highlight=False)
