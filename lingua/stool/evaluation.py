"""Jobs that probe the checkpoints of a run while it goes on, without ever holding it up.

Training writes a request beside its launch record (:func:`launch_evaluation`); the process that watches over the
ranks submits it (:func:`serve`), so that training needs no scheduler. One file an evaluation says how far it is:
``RUN/stool/evaluations/0000001000.json``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.stool import records

log = logging.getLogger(__name__)

REQUESTED, SUBMITTED, RUNNING, DONE, FAILED = "REQUESTED", "SUBMITTED", "RUNNING", "DONE", "FAILED"
# Beside lingua.checkpoint's leases, which a reader renews: this one also lasts while the job waits in the queue.
LEASE = "IN_USE.evaluation"
LEASE_S = 7 * 24 * 3600.0


def launch_evaluation(run_folder: str | Path, checkpoint_folder: str | Path) -> None:
    """Ask for an evaluation of a checkpoint that is whole. Never raises and never waits.

    Does nothing unless the run was launched with ``eval.script``. Until the evaluation is over, or a week has gone,
    the checkpoint is kept.

    Args:
        run_folder: the run's ``dump_dir``.
        checkpoint_folder: one of its checkpoints, such as ``checkpoints/0000001000``.
    """
    try:
        run = Path(run_folder)
        launch = records.home(run) / "launch.json"
        if not launch.is_file() or not json.loads(launch.read_text())["args"]["eval"]["script"]:
            return
        from lingua.storage import as_path

        checkpoint = as_path(checkpoint_folder)
        request = _file(run, checkpoint.name)
        if request.exists():
            return  # of an earlier start, which went back to a checkpoint before this one
        _hold(checkpoint)
        request.parent.mkdir(parents=True, exist_ok=True)
        records.write_json(request, {"state": REQUESTED, "checkpoint": str(checkpoint)})
    except Exception as error:
        log.warning("no evaluation of %s could be asked for: %s", checkpoint_folder, error)


def evaluations(run: Path) -> dict[str, dict[str, Any]]:
    """The run's evaluations by the name of the checkpoint's folder."""
    found = {}
    for path in sorted((records.home(run) / "evaluations").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_text())
    return found


def serve(run: Path, launch: dict[str, Any]) -> None:
    """Submit what has been asked for. A refusal is written down and stops nothing."""
    for step, evaluation in evaluations(run).items():
        if evaluation["state"] != REQUESTED:
            continue
        try:
            job = _submit(run, step, launch)
            # The job may have begun, and said so, before its number is known here.
            with _locked(run):
                now = json.loads(_file(run, step).read_text())
                now["state"] = SUBMITTED if now["state"] == REQUESTED else now["state"]
                records.write_json(_file(run, step), now | {"job": job})
        except Exception as error:
            release(evaluation["checkpoint"])
            _update(run, step, state=FAILED, reason=f"could not be submitted: {error}")
            print(f"evaluation of {step} could not be submitted: {error}", flush=True)


def _submit(run: Path, step: str, launch: dict[str, Any]) -> str:
    from lingua.args import build
    from lingua.stool import submit
    from lingua.stool.args import StoolArgs

    args, code = build(StoolArgs, ("launch.json", launch["args"])), Path(launch["code"])
    folder = records.home(run) / "evaluations"
    if args.launcher == "slurm":
        job = records.summary(run)["job"]
        dependency = args.eval.dependency.replace("{job}", str(job))
        made = submit.executor(folder, f"{run.name}_eval", code, args, args.evaluation_resources(), dependency)
        return submit.submit_slurm(made, run_evaluation, [(str(run), step)])[0]
    words = ["-m", "lingua.stool.evaluation", str(run), step]
    return f"local{submit.submit_local(words, folder / f'{step}.log', code, args)}"


def run_evaluation(run: str, step: str) -> None:
    """The evaluation job: its output goes to ``evaluations/STEP.log``, its result where its script puts it."""
    from lingua.stool.args import script_words
    from lingua.stool.ranks import script_command

    folder = Path(run)
    launch = records.read_launch(folder)
    os.chdir(launch["cwd"])
    evaluation = launch["args"]["eval"]
    checkpoint = evaluations(folder)[step]["checkpoint"]
    words = script_words(
        evaluation["config"], [f"ckpt={checkpoint}", f"out={folder}/eval/{step}", *evaluation["words"]]
    )
    command = script_command(launch, [evaluation["script"], *words])
    log_path = records.home(folder) / "evaluations" / f"{step}.log"
    with contextlib.ExitStack() as stack:
        if launch["args"]["launcher"] != "slurm":  # where the scheduler does not see to it: one at a time
            turn = stack.enter_context((log_path.parent / "turn").open("w"))
            fcntl.flock(turn, fcntl.LOCK_EX)
        _update(folder, step, state=RUNNING)
        with log_path.open("ab") as file:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT).returncode
    release(checkpoint)
    if not code:
        _update(folder, step, state=DONE)
    else:
        _update(folder, step, state=FAILED, reason=f"exit status {code}: {records.last_line(log_path)}")
        raise SystemExit(code if code > 0 else 128 - code)


def reconcile(run: Path) -> None:
    """Mark evaluations as failed whose job has ended without a word, killed or out of time."""
    from lingua.stool import scheduler

    under_way = {
        step: found["job"]
        for step, found in evaluations(run).items()
        if found["state"] in (SUBMITTED, RUNNING) and not found.get("job", "local").startswith("local")
    }
    try:
        known = scheduler.states(under_way.values())
    except scheduler.SchedulerError:
        return
    for step, job in under_way.items():
        state = known.get(job, ("gone", ""))[0]
        found = evaluations(run)[step]  # it may have ended, and said so, while the scheduler was asked
        if state not in (*scheduler.WAITING, *scheduler.ACTIVE) and found["state"] in (SUBMITTED, RUNNING):
            release(found["checkpoint"])
            _update(run, step, state=FAILED, reason=f"job {job}: {state} by the scheduler")


def evaluate_again(run: Path) -> None:
    """Submit the evaluations that failed or were asked for but never submitted. Raises UserError."""
    from lingua.storage import as_path

    run = run.absolute()
    launch = records.read_launch(run)
    if not launch["args"]["eval"]["script"]:
        raise UserError(f"{run} was launched without eval.script")
    reconcile(run)
    for step, found in evaluations(run).items():
        if found["state"] == FAILED:
            if as_path(found["checkpoint"]).is_dir():
                _hold(as_path(found["checkpoint"]))
            _update(run, step, state=REQUESTED, reason="")
    serve(run, launch)
    for step, found in evaluations(run).items():
        print(f"{step}: {found['state'].lower()} {found.get('reason', '')}".rstrip())


def _hold(checkpoint: Path) -> None:
    until = time.time() + LEASE_S
    (checkpoint / LEASE).write_text(json.dumps({"until": until, "host": os.uname().nodename}))


def release(checkpoint: str) -> None:
    """Let a checkpoint be removed again, also after a failure: else a probe that never works would fill the disk."""
    from lingua.storage import as_path

    with contextlib.suppress(OSError):
        (as_path(checkpoint) / LEASE).unlink()


def _file(run: Path, step: str) -> Path:
    return records.home(run) / "evaluations" / f"{step}.json"


@contextlib.contextmanager
def _locked(run: Path) -> Any:
    with (records.home(run) / "evaluations" / "lock").open("w") as file:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _update(run: Path, step: str, **fields: Any) -> None:
    with _locked(run):
        path = _file(run, step)
        records.write_json(path, json.loads(path.read_text()) | fields)


if __name__ == "__main__":
    import sys

    run_evaluation(sys.argv[1], sys.argv[2])
