"""How pytest-xdist shares the tests out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RECORD = """
import os, pathlib, time

def test_{name}():
    time.sleep(0.1)
    with pathlib.Path({seen!r}).open("a") as file:
        print({where!r}, os.getpid(), file=file)
"""


def test_whole_files_and_all_of_slurm_in_one_process(tmp_path: Path) -> None:
    """Two processes with tests of SLURM would start two clusters."""
    files = ("slurm/test_a.py", "slurm/test_b.py", "test_c.py", "apps/test_d.py")
    for where in files:
        path = tmp_path / "tests" / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(RECORD.format(name=n, seen=str(tmp_path / "seen"), where=where) for n in range(6)))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", "--no-loadscope-reorder"]
    done = subprocess.run([*command, f"--rootdir={tmp_path}", str(tmp_path / "tests")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 24
    processes = {where: {pid for place, pid in seen if place == where} for where in files}
    assert all(len(pids) == 1 for pids in processes.values())
    assert processes["slurm/test_a.py"] == processes["slurm/test_b.py"]
    assert len({pid for _, pid in seen}) == 2
