"""From a launch to a job: submitit's batch script for SLURM, a process in the background, or this process."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from lingua.errors import UserError
from lingua.stool.args import ResourceArgs, StoolArgs

SBATCH_TIMEOUT_S = 120


class _Executor(SlurmExecutor):
    """submitit's, whose batch script can be seen without submitting it, also where there is no SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Against a dead controller sbatch would wait for long.
        return ["timeout", str(SBATCH_TIMEOUT_S), "sbatch", str(submission_file_path)]

    def script(self, array: int | None) -> str:
        self.parameters["map_count"] = array
        return self._make_submission_file_text(self._submitit_command_str, "dry_run")


def executor(
    folder: Path, name: str, code: Path, args: StoolArgs, resources: ResourceArgs, dependency: str
) -> _Executor:
    """A submitit executor of which each job is one process on the first node, which starts the ranks by srun.

    Args:
        folder: for the batch script, submitit's pickles and the log of that process.
        code: snapshot to run.
    """
    made = _Executor(folder, python=f"exec {args.python or shlex.quote(sys.executable)}")
    options = {"requeue": True, "kill-on-invalid-dep": "yes", **resources.sbatch_options()}
    if dependency:
        options["dependency"] = dependency
    made.update_parameters(
        job_name=name,
        nodes=resources.nodes,
        ntasks_per_node=resources.ranks_per_node,
        signal_delay_s=args.signal_s,
        array_parallelism=args.max_parallel,
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        setup=[*resources.setup, *environment_lines(code)],
        additional_parameters=options,
    )
    return made


def environment_lines(code: Path) -> list[str]:
    """With these Python takes the snapshot's modules, whatever folder it is started in."""
    return [f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1"]


def submit_slurm(made: _Executor, function: Callable[..., None], calls: list[tuple[str, ...]]) -> list[str]:
    """One job that makes one call, or an array of several; returns the number of each.

    Raises:
        UserError: there is no sbatch, or it refuses; with its message in full and the command.
    """
    try:
        # submitit prints what sbatch says; it is in the error that follows.
        with _outside_of_a_job(), redirect_stderr(io.StringIO()):
            jobs = made.map_array(function, *zip(*calls, strict=True))
    except FileNotFoundError as error:
        raise UserError(f"sbatch cannot be run ({error}): is this a login node? launcher=local runs here") from None
    except (FailedJobError, FailedSubmissionError) as error:
        cause = error.__cause__
        code = getattr(cause, "returncode", None)
        said = "\n".join(filter(None, (getattr(cause, "output", ""), str(error)))) or f"exit status {code}"
        if code == 127:
            raise UserError("sbatch not found: is this a login node? launcher=local runs on this machine") from None
        if code == 124:
            said = f"no answer in {SBATCH_TIMEOUT_S} s"
        command = shlex.join(getattr(cause, "cmd", ["sbatch"])[2:])
        raise UserError(f"the scheduler refused the job:\n{said}\nThe command was: {command}") from None
    return [job.job_id for job in jobs]


@contextmanager
def _outside_of_a_job() -> Iterator[None]:
    """Hide the variables of a job this process may run in: sbatch would take them for options of the new one."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    own = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "MASTER_", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    hidden = {key: value for key, value in os.environ.items() if key.startswith(own) and key != "SLURM_CONF"}
    for key in hidden:
        del os.environ[key]
    try:
        yield
    finally:
        os.environ.update(hidden)


def submit_local(words: list[str], log: Path, code: Path, args: StoolArgs) -> int:
    """Start Python with ``words`` in the background, its output in ``log``; returns its process number."""
    log.parent.mkdir(parents=True, exist_ok=True)
    python = args.python or shlex.quote(sys.executable)
    line = f"exec {python} -u {shlex.join(words)}"
    with log.open("ab") as file:
        process = subprocess.Popen(
            ["bash", "-c", "\n".join([*args.setup, *environment_lines(code), line])],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C here does not end it
        )
    return process.pid
