"""The launcher: what the ranks get, and what comes of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hidet_dist import launch

ALL_REDUCE = """
import sys
import numpy as np
from hidet_dist import native
from hidet_dist.runtime import session
comm = session.communicator_for((2,))
comm.bind()
data = np.full(3, comm.rank + 1, dtype=np.float32)
native.all_reduce(data.ctypes.data, data.ctypes.data, 3, 0, 0, 1)
comm.check()
open(f"{sys.argv[1]}.{comm.rank}", "w").write(str(data.tolist()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_each_rank_gets_its_variables(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_launch_variables: None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    script.write_text(
        "import os, sys\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT',"
        " 'OMP_NUM_THREADS']\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(' '.join([os.environ[n] for n in names] + sys.argv[2:]))\n"
    )
    arguments = ["-n", "3", "--master-port", "12345", str(script), str(tmp_path / "out"), "-n", "--flag"]
    assert launch.main(arguments) == 0
    for rank in range(3):
        text = (tmp_path / f"out{rank}").read_text()
        assert text == f"{rank} {rank} 3 3 127.0.0.1 12345 2 -n --flag"


SEVERAL = ["--nnodes", "2", "--node-rank", "1", "--rdzv", "10.0.0.1:29500"]


@pytest.mark.parametrize(
    ("where", "address"), [("10.0.0.1:29500", "10.0.0.1"), ("node0:29500", "node0"), ("[fd00::1]:29500", "fd00::1")]
)
def test_ranks_of_several_hosts_are_numbered_host_by_host(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_launch_variables: None, where: str, address: str
) -> None:
    monkeypatch.setenv("HIDET_DIST_SECRET", "0123456789abcdef")
    script.write_text(
        "import os, sys\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT',"
        " 'HIDET_DIST_SECRET']\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(' '.join([os.environ[n] for n in names]))\n"
        "sys.exit(os.environ['RANK'] == '3')\n"
    )
    arguments = ["-n", "2", "--nnodes", "3", "--node-rank", "1", "--rdzv", where, str(script), str(tmp_path / "out")]
    assert launch.main(arguments) == 1
    for rank in (2, 3):
        text = (tmp_path / f"out{rank}").read_text()
        assert text == f"{rank} {rank - 2} 6 2 {address} 29500 0123456789abcdef"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nnodes", "0"], "--nnodes must be positive, not 0"),
        (["--node-rank", "1"], "there is one host: give --nnodes"),
        (["--rdzv", "10.0.0.1:29500"], "--rdzv is for several hosts"),
        (["--nnodes", "2", "--rdzv", "10.0.0.1:29500"], "--node-rank is missing: give each of the 2 hosts another"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv", "10.0.0.1:29500"], "--node-rank is 2"),
        (["--nnodes", "2", "--node-rank", "1"], "--rdzv is missing"),
        (["--nnodes", "2", "--node-rank", "1", "--rdzv", "10.0.0.1"], "not '10.0.0.1'"),
        (["--nnodes", "2", "--node-rank", "1", "--rdzv", "10.0.0.1:0"], "not '10.0.0.1:0'"),
        (["--nnodes", "2", "--node-rank", "1", "--rdzv", ":29500"], "not ':29500'"),
        ([*SEVERAL, "--master-port", "29500"], "--master-port is for one host"),
        (SEVERAL, "must share a secret: set HIDET_DIST_SECRET"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], no_launch_variables: None, arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(["-n", "2", *arguments, "x.py"])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_program_may_be_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text("import sys; sys.exit(int(sys.argv[1]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch.main(["-n", "1", "-m", "some_module", "5"]) == 5


def test_the_status_is_that_of_the_first_to_fail(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(
        "import os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "if rank == 1: open(sys.argv[1], 'w')\n"
        "while rank == 2 and not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "time.sleep([0, 0, 1][rank])\n"
        "print('rank', rank, 'ends', flush=True)\n"
        "sys.exit([0, 3, 4][rank])\n"
    )
    assert launch.main(["-n", "3", str(script), str(script.with_name("first"))]) == 3
    output = capfd.readouterr()
    assert "rank 1 exited with status 3" in output.err
    assert "rank 2 exited with status 4" in output.err
    assert "rank 2 ends" in output.out


def test_those_that_go_on_after_a_failure_are_ended(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1000)\n"
    )
    assert launch.main(["-n", "2", "--grace", "0.5", str(script)]) == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert "rank 1 was ended by SIGKILL" in error
    assert "ending rank 0" in error


def test_those_that_ignore_being_ended_are_killed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TERMINATE_SECONDS", 0.5)
    script.write_text("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n")
    assert launch.main(["-n", "2", "--timeout", "0.5", str(script)]) == launch.TIMED_OUT


@pytest.mark.parametrize("arguments", [["x.py"], ["-n", "0", "x.py"], ["-n", "2"], ["-n", "1", "--timeout", "-1", "x"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(arguments)
    assert caught.value.code == 2


def test_signals_are_forwarded(script: Path) -> None:
    script.write_text(
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    os.write(1, b'stopping\\n')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.write(1, b'ready\\n')\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "".join(process.stdout.readline() for _ in range(2)).count("ready") == 2
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().count("stopping") == 2
        assert process.wait(timeout=1000) in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize("launcher", ["hidet_dist.launch", "torch.distributed.run"])
def test_ranks_communicate_and_end_cleanly(script: Path, tmp_path: Path, launcher: str) -> None:
    """Under torchrun too, whose agent hosts the store."""
    script.write_text(ALL_REDUCE)
    count = ["-n", "2"] if launcher == "hidet_dist.launch" else ["--nproc-per-node", "2", "--master-port"]
    if launcher != "hidet_dist.launch":
        count.append(str(launch.free_port()))
    done = subprocess.run(
        [sys.executable, "-m", launcher, *count, str(script), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    for rank in range(2):
        assert (tmp_path / f"out.{rank}").read_text() == "[3.0, 3.0, 3.0]"
