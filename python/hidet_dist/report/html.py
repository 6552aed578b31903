"""Rendering of a report as one HTML page that contains its data, style and script, and needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files

from hidet_dist.report.data import Operator, Report, columns_of
from hidet_dist.report.measured import Trace
from hidet_dist.report.pack import pack

# Later scripts use definitions of earlier ones.
_SCRIPTS = (
    "base.js", "shards.js", "tables.js", "model.js", "collectives.js", "memory.js", "timeline.js", "start.js",
)  # fmt: skip
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(report: Report, traces: Sequence[Trace] = (), live: bool = False) -> str:
    """Render a report as an HTML page.

    Parameters
    ----------
    report: Report
        The data of the report.
    traces: sequence of Trace
        Measured runs of the plan, to be shown beside the prediction.
    live: bool
        Whether the page is served by :mod:`hidet_dist.report.live`, so that users can pin weights.
    """
    style, script = _read("style.css"), _script()
    data = {
        "report": pack(report),
        "columns": columns_of(Operator),
        "traces": [pack(trace) for trace in traces],
        "live": live,
    }
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
            *(["connect-src 'self'"] if live else []),
        )
    )
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(report.title or "Plan"),
        "STYLE": style,
        "DATA": as_script_data(data),
        "SCRIPT": script,
    }
    # The template is split once, so that marks in inserted text have no effect.
    pieces = _read("page.html").split("%%")
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def as_script_data(value: object) -> str:
    """Convert a value to JSON that is safe in a script element: ``</script>`` within texts is escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def _read(name: str) -> str:
    return (files("hidet_dist.report") / "page" / name).read_text(encoding="utf-8")


def _script() -> str:
    return "(() => {\n'use strict';\n" + "".join(map(_read, _SCRIPTS)) + "})();\n"


def _hash(text: str) -> str:
    """Return the source expression of an inline style or script (Content Security Policy Level 3, section 2.3.1)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
