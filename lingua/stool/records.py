"""What a run folder says of its own jobs, so that its state is known without the scheduler.

``RUN/stool/jobs.jsonl`` has a line for each submission, start, end and cancellation; ``launch.json`` is what the
newest submission was told.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from lingua.errors import UserError

# States of a run by its records. A job that has said it will not go on is in one of ENDED.
SUBMITTED, RUNNING, REQUEUED, CANCELLING = "SUBMITTED", "RUNNING", "REQUEUED", "CANCELLING"
FINISHED, FAILED, CANCELLED = "FINISHED", "FAILED", "CANCELLED"
PENDING, LOST = "PENDING", "LOST"  # states that only the scheduler can tell
ENDED = (FINISHED, FAILED, CANCELLED)
STOPPED = (FAILED, CANCELLED, LOST, None)  # what can be submitted again


def home(run: Path) -> Path:
    """The folder of a run, sweep or evaluation that is the launcher's."""
    return run / "stool"


def append(run: Path, event: str, **fields: Any) -> None:
    """Add one record: ``event`` is submit, start, end or cancel."""
    line = json.dumps({"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **fields}) + "\n"
    path = home(run) / "jobs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line.encode())  # one write, so that lines of several processes do not mix
        os.fsync(file)
    finally:
        os.close(file)


def read(run: Path) -> list[dict[str, Any]]:
    """All records, oldest first; a last line cut off by a kill is left out."""
    path = home(run) / "jobs.jsonl"
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def summary(run: Path) -> dict[str, Any]:
    """State of the newest job by its records: state, job, launcher, restarts, exit code, reason, failure."""
    found: dict[str, Any] = {"state": None, "job": None, "launcher": None, "restarts": 0}
    all_records = read(run)
    submissions = [record for record in all_records if record["event"] == "submit"]
    if not submissions:
        return found
    found |= {"state": SUBMITTED, **{key: submissions[-1][key] for key in ("job", "launcher", "host")}}
    for record in all_records:  # a job may start before its submission is written down
        if record["job"] != found["job"]:
            continue
        event = record["event"]
        if event == "start":
            found |= {"state": RUNNING, "restarts": record["restart"], "host": record["host"], "pid": record["pid"]}
        elif event == "cancel":
            found["state"] = CANCELLING
        elif event == "end":
            found |= {key: record.get(key) for key in ("state", "exit", "reason", "failure")}
    return found


def was_cancelled(run: Path, job: str) -> bool:
    """Whether ``cancel`` was asked for this job."""
    return any(record["event"] == "cancel" and record["job"] == job for record in read(run))


def write_launch(run: Path, launch: dict[str, Any]) -> None:
    """Write ``launch.json`` whole."""
    home(run).mkdir(parents=True, exist_ok=True)
    write_json(home(run) / "launch.json", launch)


def read_launch(run: Path) -> dict[str, Any]:
    """Raises UserError if the folder was not launched by this command."""
    path = home(run) / "launch.json"
    try:
        return json.loads(path.read_text())
    except OSError:
        raise UserError(f"{run}: not a run folder of this launcher (no {path})") from None
    except ValueError:
        raise UserError(f"{path}: not valid JSON") from None


def write_json(path: Path, value: Any) -> None:
    """Write so that a reader sees all of it or what was there before."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def tail(path: Path, size: int = 65536) -> list[str]:
    """Non-empty lines in the last ``size`` bytes of a file, [] if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()]


def last_line(*paths: Path) -> str:
    """The last non-empty line of the first of ``paths`` that has one."""
    for path in paths:
        lines = tail(path)
        if lines:
            return lines[-1]
    return ""


def progress(run: Path) -> dict[str, Any]:
    """The newest step, loss, validation losses and tokens a second in ``metrics.jsonl``."""
    found: dict[str, Any] = {}
    for line in reversed(tail(run / "metrics.jsonl")):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut at the start of the tail, or still being written
        for key, value in record.items():
            if key in ("step", "loss", "tokens_per_second") or key.startswith("valid/"):
                found.setdefault(key, value)
    return found
