"""How runs fare: their own records, refined by what the scheduler says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.stool import evaluation, records, scheduler, sweep
from lingua.stool.ranks import rank_log


def states(runs: list[Path]) -> dict[Path, dict[str, Any]]:
    """The summary of each run's records with its state now, and ``note`` where that needs a word.

    A scheduler that cannot be asked leaves the state of the records.
    """
    found = {run: records.summary(run) for run in runs}
    open_runs = {run: about for run, about in found.items() if about["state"] not in records.ENDED and about["job"]}
    jobs = {about["job"] for about in open_runs.values() if about["launcher"] == "slurm"}
    known, problem = {}, ""
    try:
        known = scheduler.states(jobs)
    except scheduler.SchedulerError as error:
        problem = f"by the records alone: {error}"
    for run, about in open_runs.items():
        if about["launcher"] == "slurm":
            if problem:
                about["note"] = problem
                continue
            state, reason = known.get(about["job"], (None, ""))
        else:
            state, reason = _local_state(about), ""
            if state is None:
                about["note"] = f"by the records alone: it runs on {about['host']}"
                continue
        # The job may have ended, and said so, while the scheduler was asked.
        now = records.summary(run)
        if now["state"] in records.ENDED:
            found[run] = now
        elif state in scheduler.WAITING:
            about["state"] = records.REQUEUED if about["state"] == records.REQUEUED else records.PENDING
            about["note"] = reason
        elif state in scheduler.ACTIVE:
            if about["state"] != records.CANCELLING:
                about["state"] = records.RUNNING
        elif about["state"] == records.CANCELLING or state == "CANCELLED":
            about["state"] = records.CANCELLED
        elif state in (None, "COMPLETED"):
            about |= {"state": records.LOST, "note": "the job is gone and left no record of its end"}
        else:
            about |= {"state": records.FAILED, "reason": f"{state} by the scheduler"}
    return found


def _local_state(about: dict[str, Any]) -> str | None:
    """RUNNING, PENDING in the queue, COMPLETED for a process that is gone, or None for another machine's."""
    queue = int(about["job"].removeprefix("local").split("_")[0])
    alive = scheduler.alive(about.get("pid", queue), about.get("host"))
    if not alive:
        return None if alive is None else "COMPLETED"
    return "PENDING" if about["state"] == records.SUBMITTED else "RUNNING"


def run_state(run: Path) -> str:
    """State of one run now."""
    return states([run])[run]["state"]


def status(folders: list[Path], as_json: bool = False) -> None:
    """Print a table of runs; sweeps are expanded and their index is brought up to date."""
    runs = sweep.expand([folder.absolute() for folder in folders])
    found = states(runs)
    for folder in folders:
        if (folder / sweep.INDEX).is_file():
            sweep.refresh(folder.absolute(), known=found)
    for run in runs:
        evaluation.reconcile(run)
    lines = {run: _line(run, about) for run, about in found.items()}
    if as_json:
        for line in lines.values():
            print(json.dumps(line))
        return
    header = ["run", "state", "job", "step", "loss", "tokens/s", "restarts"]
    rows = [header] + [[str(line[key] or "-") for key in header] for line in lines.values()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row, line in zip(rows, [None, *lines.values()], strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for key in ("note", "failure", "evaluations", "log") if line else ():
            if line[key]:
                print(f"    {key}: {line[key]}")


def _line(run: Path, about: dict[str, Any]) -> dict[str, Any]:
    done = records.progress(run)
    launched = (records.home(run) / "launch.json").is_file()  # else the folder of a sweep's run has been removed
    plan = records.read_launch(run)["plan"] if launched else {}
    loss, speed = done.get("loss"), done.get("tokens_per_second")
    return {
        "run": run.name,
        "state": about["state"] or "NOT SUBMITTED",
        "job": about["job"],
        "step": f"{done.get('step', 0):,}" + (f"/{plan['steps']:,}" if "steps" in plan else ""),
        "loss": "-" if loss is None else f"{loss:.4f}",
        "tokens/s": "-" if speed is None else f"{speed:,.0f}",
        "restarts": str(about["restarts"]),
        "note": about.get("note", ""),
        "failure": _failure(run, about),
        "evaluations": _evaluations(run),
        "log": "" if about["state"] == records.FINISHED else last_log_line(run, about),
    }


def _failure(run: Path, about: dict[str, Any]) -> str:
    if about["state"] not in (records.FAILED, records.LOST):
        return ""
    failure = about.get("failure")
    if not failure:
        # Where there is no record of the end: what the process said that should have started the ranks.
        said = "" if "exit" in about else records.last_line(_job_log(run, about))
        return "; ".join(filter(None, [about.get("reason"), said and f"the job's last line: {said}"]))
    where = f"rank {failure['rank']} on {failure['node']}: " if failure["rank"] is not None else ""
    said = f"; its last line: {failure['line']}" if failure["line"] else ""
    return f"{about['reason']}; first {where}{failure['cause']}{said}"


def _evaluations(run: Path) -> str:
    parts = []
    for step, found in evaluation.evaluations(run).items():
        reason = f" ({found['reason']})" if "reason" in found else ""
        parts.append(f"{int(step)} {found['state'].lower()}{reason}")
    return ", ".join(parts)


def outputs(run: Path, job: str | None = None) -> list[Path]:
    """Folders of what the ranks printed, one a start, oldest first."""
    starts = [record for record in records.read(run) if record["event"] == "start"]
    return [Path(record["logs"]) for record in starts if job in (None, record["job"])]


def last_log_line(run: Path, about: dict[str, Any]) -> str:
    """The last line of the training log, else of rank 0's output."""
    folders = outputs(run, about["job"])
    return records.last_line(run / "train.log", *(rank_log(folder, 0) for folder in folders[-1:]))


def _job_log(run: Path, about: dict[str, Any]) -> Path:
    """What the process that watches over the ranks of the newest job printed."""
    home = records.home(Path(records.read_launch(run)["sweep"] or run))
    return home / "submitit" / f"{about['job']}_0_log.out" if about["launcher"] == "slurm" else home / "local.log"


def logs(run: Path, rank: int | None, follow: bool) -> None:
    """Print the training log, or what one rank printed in its last start; with ``follow`` until the run has ended."""
    run = run.absolute()
    if (run / sweep.INDEX).is_file():
        raise UserError(
            f"{run} is a sweep: name one of its runs, {', '.join(line['name'] for line in sweep.runs(run))}"
        )
    ranks = records.read_launch(run)["plan"]["ranks"]
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(f"--rank {rank}: {run} has {ranks} rank{'s' * (ranks > 1)}, counted from 0")
    path = _log(run, rank)
    if path is None and not follow:
        raise UserError(f"{run}: nothing has been printed yet; its state is {run_state(run)}")
    position, last_check, state = 0, time.monotonic(), records.RUNNING
    while True:
        newest = _log(run, rank)
        if newest != path:
            path, position = newest, 0
        if path is not None:
            with path.open("rb") as file:
                file.seek(position)
                sys.stdout.write(file.read().decode("utf-8", "replace"))
                sys.stdout.flush()
                position = file.tell()
        if not follow or state in records.STOPPED or state == records.FINISHED:
            return
        if time.monotonic() - last_check > 5:
            last_check, state = time.monotonic(), run_state(run)  # once more around: what was printed last
        time.sleep(0.5)


def _log(run: Path, rank: int | None) -> Path | None:
    folders = outputs(run)
    if rank is None:
        paths = [run / "train.log", *(rank_log(folder, 0) for folder in folders[-1:])]
        paths.append(_job_log(run, records.summary(run)))
    else:
        paths = [rank_log(folder, rank) for folder in folders[-1:]]
    return next((path for path in paths if path.is_file() and path.stat().st_size), None)


def cancel(folders: list[Path]) -> None:
    """End runs: those that train get a signal and save, those that wait leave the queue. Raises UserError."""
    import os
    import signal

    runs = sweep.expand([folder.absolute() for folder in folders])
    on_slurm = []
    for run, about in states(runs).items():
        if about["state"] in (*records.STOPPED, records.FINISHED):
            print(f"{run.name}: {about['state'].lower()} already" if about["state"] else f"{run.name}: not submitted")
            continue
        records.append(run, "cancel", job=about["job"])
        print(f"cancelling {about['job']}: {run}")
        if about["launcher"] == "slurm":
            on_slurm.append(about["job"])
        elif "pid" in about:
            if scheduler.alive(about["pid"], about["host"]) is None:
                raise UserError(f"{run} runs on {about['host']}: cancel it there")
            os.kill(about["pid"], signal.SIGTERM)
    if on_slurm:
        try:
            scheduler.cancel(on_slurm)
        except scheduler.SchedulerError as error:
            raise UserError(f"the scheduler did not cancel: {error}") from None
