"""Programs with a time limit: what they say, and that nothing of them is left."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from hidet_dist.testing.processes import Programs


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


# A child that would outlive its parent, and says who it is.
WITH_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_output_and_status_are_returned() -> None:
    done = Programs().run(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), 60)
    assert (done.status, done.output, done.errors) == (3, "out\n", "err\n")


def test_a_crash_is_its_signal() -> None:
    assert Programs().run(python("import os; os.kill(os.getpid(), 11)"), 60).status == -11


def test_a_program_that_hangs_ends_in_time_with_what_it_started(tmp_path: Path) -> None:
    done = Programs().run([*python(WITH_A_CHILD), str(tmp_path / "child"), "600"], 5)
    assert done.status is None
    assert 5 <= done.seconds < 500
    assert gone(int((tmp_path / "child").read_text()))


def test_descendants_of_a_program_end_with_it(tmp_path: Path) -> None:
    assert Programs().run([*python(WITH_A_CHILD), str(tmp_path / "child"), "0"], 60).status == 0
    assert gone(int((tmp_path / "child").read_text()))


def test_programs_are_nicer_than_this_one() -> None:
    done = Programs().run(python("import os; print(os.getpriority(os.PRIO_PROCESS, 0))"), 60, niceness=3)
    assert int(done.output) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)


def test_programs_stand_still_while_paused_and_end_together(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    count = f"import time\nwhile True:\n open({str(file)!r}, 'a').write('x'); time.sleep(0.01)"
    programs, results = Programs(), []
    thread = threading.Thread(target=lambda: results.append(programs.run(python(count), 60)))
    thread.start()
    while not file.exists():
        time.sleep(0.01)
    with programs.paused():
        time.sleep(0.2)
        before = file.stat().st_size
        time.sleep(0.5)
        assert file.stat().st_size == before
    while file.stat().st_size == before:
        time.sleep(0.01)
    programs.end()
    thread.join(30)
    assert not thread.is_alive()
    assert results[0].status == -15
    assert programs.run(python("print(1)"), 60).output == ""
