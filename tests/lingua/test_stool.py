"""Launching without a scheduler at hand: words, plans, batch scripts, snapshots, records, decisions."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apps.bert.electra import Electra
from apps.bert.model import Bert
from apps.bert.train import BertTrainArgs
from apps.crossbert.model import CrossBert
from apps.crossbert.train import CrossBertTrainArgs
from lingua.args import parse, to_dict
from lingua.errors import UserError
from lingua.stool import launch, launch_evaluation, records, scheduler, snapshot, status, submit, sweep
from lingua.stool.args import EvaluationArgs, StoolArgs, read_request, split_values
from lingua.stool.evaluation import LEASE, evaluations
from lingua.stool.job import ENDING, Job, decide
from lingua.stool.plan import load_script, make_plan
from lingua.stool.ranks import SRUN_FAILURE, Ranks, _numbers
from lingua.storage import as_path
from tests.slurm.launching import wait
from tests.support import ROOT, environment, tiny_words

START = ["script=apps.crossbert.train", "time=60"]


def stool(*words: object, **changes: object) -> subprocess.CompletedProcess:
    variables = environment() | {key: str(value) for key, value in changes.items()}
    command = [sys.executable, "-m", "lingua.stool", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)


# --- words


def test_words_before_and_after_the_dashes() -> None:
    request = read_request(
        [*START, "config=a.yaml", "sweep.optim.lr=1e-3,2e-3", "sweep.data.sources=[a,b],[c]", "--", "steps=3", "seed=1"]
    )
    assert request.args.config == "a.yaml"
    assert request.words == ["steps=3", "seed=1"]
    assert request.sweep == {"optim.lr": ["1e-3", "2e-3"], "data.sources": ["[a,b]", "[c]"]}


def test_it_is_silent_where_its_reader_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "lingua.stool", "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 141)


def test_a_cluster_file_gives_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("account: abc\npartition: gpu\nsetup: [module load python]\n")
    args = read_request([*START, f"cluster={tmp_path}/mine.yaml", "partition=long"]).args
    assert (args.account, args.partition, args.setup) == ("abc", "long", ["module load python"])
    (tmp_path / "mine.yaml").write_text("time: 24:00:00\n")  # a number of seconds, in YAML
    with pytest.raises(UserError, match=r"mine.yaml: time: 86400 is read as no text: put it in quotes"):
        read_request(["script=a", f"cluster={tmp_path}/mine.yaml"])


def test_text_stays_text() -> None:
    args = read_request(["script=a", "time=24:00:00", "account=0123", "qos='x'", "sbatch.nice=0:30"]).args
    assert (args.time, args.account, args.qos, args.sbatch) == ("24:00:00", "0123", "x", {"nice": "0:30"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["script=a"], "no value for time: a job needs a limit"),
        ([*START, "steps=3"], "unknown key steps: .*; keys of the script's own config come after --"),
        ([*START, "--", "steps"], "after --: 'steps' is not of the form key=value"),
        ([*START, "launcher=pbs"], "launcher=pbs: expected slurm, local, debug"),
        ([*START, "nodes=0"], "nodes=0: expected at least 1"),
        (["script=a", "time=1:2:3:4"], "time=1:2:3:4: expected minutes"),
        (["script=a", "launcher=local", "nodes=2"], "nodes=2 needs launcher=slurm"),
        ([*START, "eval.script=b"], "no value for eval.time"),
        (["script=a", "time=2"], "signal_s=120 is no less than time=2: the run would be told to stop at once"),
        ([*START, "ngpu=2", "tasks_per_node=4"], "tasks_per_node=4: each rank needs a GPU of its own, ngpu=2"),
        ([*START, "cluster=odd.yaml"], "odd.yaml: eval: expected keys with values, found 3"),
        ([*START, "sweep.seed=1,,2"], "sweep.seed=1,,2: expected values with commas"),
    ],
)
def test_words_that_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.yaml").write_text("eval: 3\n")
    with pytest.raises(UserError, match=message):
        read_request(words)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("24:00:01", 86401),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:05", 217805),
    ],
)
def test_time_limits_as_sbatch_takes_them(limit: str, seconds: int) -> None:
    assert read_request(["script=a", f"time={limit}", f"signal_s={seconds - 1}"]).args.time == limit
    with pytest.raises(UserError, match="told to stop at once"):
        read_request(["script=a", f"time={limit}", f"signal_s={seconds}"])


def test_values_are_split_outside_of_brackets_only() -> None:
    assert split_values("k", "{a: 1, b: 2},[1,[2,3]],x") == ["{a: 1, b: 2}", "[1,[2,3]]", "x"]


def test_evaluation_jobs_take_what_they_do_not_say_from_training() -> None:
    args = read_request([*START, "account=abc", "qos=high", "eval.script=b", "eval.time=5", "eval.qos=low"]).args
    resources = args.evaluation_resources()
    assert (resources.account, resources.qos, resources.time) == ("abc", "low", "5")


# --- plans


def config(*words: str) -> CrossBertTrainArgs:
    fixed = ["dump_dir=x", "data.root_dir=x", "data.seq_len=32", "batch_tokens=2048", "micro_rows=4", "model.dim=32"]
    return parse(CrossBertTrainArgs, [*fixed, "model.n_heads=2", "model.n_layers=2", "model.vocab_size=100", *words])


def plan(*words: str, **launch: object) -> dict:
    args = StoolArgs(script="apps.crossbert.train", time="10", **launch)
    return make_plan(load_script("apps.crossbert.train"), config(*words), args)


def test_the_plan_of_a_run() -> None:
    # A row counts 2 views x 32 tokens: 2048 tokens are 32 rows, 8 on each of 4 ranks, in 2 passes of 4.
    found = plan("steps=10", nodes=2, ngpu=2)
    assert {k: found[k] for k in ("gpus", "ranks", "rows", "accumulation", "micro_rows", "steps", "tokens")} == {
        "gpus": 4, "ranks": 4, "rows": 32, "accumulation": 2, "micro_rows": 4, "steps": 10, "tokens": 20480,
    }  # fmt: skip
    assert found["parameters"] == sum(p.numel() for p in CrossBert(config("steps=10").model).parameters())


def test_length_by_tokens_and_by_flops() -> None:
    assert plan("tokens=20480")["steps"] == 10
    model = CrossBert(config("steps=1").model)
    flops = 7 * 2048 * model.flops_per_token(32, 0.5, True)
    assert plan(f"flops={flops}")["steps"] == 7


@pytest.mark.parametrize(
    ("words", "launch", "message"),
    [
        (["batch_tokens=100"], {}, "batch_tokens=100 is not a whole number of rows of 64 tokens"),
        ([], {"nodes": 9, "ngpu": 4}, "is 32 rows a step, fewer than the 36 ranks of nodes=9 x 4"),
        (["distributed.dp_shard=3"], {"nodes": 2}, "distributed.dp_shard=3 does not divide the 2 ranks"),
        ([], {"gpu_gb": 1e-4}, r"GB are needed on each GPU, which have gpu_gb=0\.0001: lower micro_rows=4"),
    ],
)
def test_a_config_that_cannot_run_there(words: list[str], launch: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan("steps=1", *words, **launch)


@pytest.mark.parametrize("objective", ["mlm", "rtd"])
def test_the_plan_is_of_the_model_that_is_trained(objective: str) -> None:
    words = ["dump_dir=x", "data.root_dir=x", "steps=1", "model.vocab_size=100", f"objective={objective}"]
    args = parse(BertTrainArgs, [*words, "model.dim=32", "model.n_layers=2", "model.n_heads=2", "rtd.n_layers=1"])
    found = make_plan(load_script("apps.bert.train"), args, StoolArgs(script="apps.bert.train", time="10"))
    model = Electra(args.model, args.rtd) if objective == "rtd" else Bert(args.model)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())


def test_scripts_that_are_none() -> None:
    with pytest.raises(UserError, match=r"script=apps.nothing: No module named 'apps.nothing'"):
        load_script("apps.nothing")
    with pytest.raises(UserError, match=r"script=lingua.errors: has no call of cli"):
        load_script("lingua.errors")


def test_a_script_that_the_job_would_not_find(tmp_path: Path) -> None:
    module = load_script("apps.crossbert.train").module
    with pytest.raises(UserError, match=r"train.py is not in the copy of the code that the job runs"):
        snapshot.check_module(tmp_path, module)
    (tmp_path / "apps/crossbert").mkdir(parents=True)
    (tmp_path / "apps/crossbert/train.py").write_text("")
    snapshot.check_module(tmp_path, module)


# --- batch scripts


def test_a_dry_run_needs_no_slurm_and_writes_nothing(tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    words = [word for word in tiny_words("crossbert", corpus, run) if not word.startswith("dump_dir")]
    own = ["nodes=2", "ngpu=4", "cpus=8", "mem=100G", "account=abc", "qos=q", "constraint=a100", "exclude=n[1-2]"]
    own += ["sbatch.mail-type=END", "sbatch.exclusive=true", "setup=[module load cuda]", "dependency=afterok:12"]
    done = stool(*START, *own, f"dump_dir={run}", "dry_run=true", "--", *words, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert not run.exists()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", done.stdout, re.MULTILINE))
    expected = {
        "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "cpus-per-task": "8", "mem": "100G",
        "account": "abc", "qos": "q", "constraint": "a100", "exclude": "'n[1-2]'", "mail-type": "END", "exclusive": "",
        "dependency": "afterok:12", "time": "60", "signal": "USR2@120", "requeue": "", "open-mode": "append",
        "kill-on-invalid-dep": "yes", "job-name": "run",
    }  # fmt: skip
    assert {key: options.get(key) for key in expected} == expected
    assert "wckey" not in options
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("exec "))
    assert "# ranks         8 (2 nodes x 4), 8 GPUs" in lines


def test_overrides_are_checked_before_anything_is_written(tmp_path: Path, corpus: Path) -> None:
    words = tiny_words("crossbert", corpus, tmp_path / "run")
    done = stool(*START, "--", *words, "optim.lrr=1")
    assert (done.returncode, done.stderr) == (
        2,
        "error: the command line: unknown key optim.lrr: did you mean optim.lr?\n",
    )
    assert list(tmp_path.glob("run*")) == []


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["sweep.file="], r"\.: no such file; expected a YAML config"),
        (["sweep.dump_dir=a,b"], "dump_dir cannot be swept"),
        (["dump_dir=runs/50%j"], r"50%j: SLURM puts something else for a % in the path"),
    ],
)
def test_launches_that_are_refused(
    own: list[str], message: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in tiny_words("crossbert", corpus, Path("x")) if "dump_dir=" not in word]
    with pytest.raises(UserError, match=message):
        launch.launch(read_request([*START, "ngpu=0", "dump_dir=runs/x", *own, "--", *words]))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_in_one_line(corpus: Path) -> None:
    words = [word for word in tiny_words("crossbert", corpus, Path("x")) if "dump_dir=" not in word]
    done = stool(*START, "ngpu=0", "dump_dir=/dev/null/run", "--", *words)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*Not a directory: '/dev/null/run/.*'\n", done.stderr)


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], StoolArgs]]:
    """The runs and the resources of each submission, none of which is made."""
    made: list[tuple[list[str], StoolArgs]] = []

    def submit(folder: Path, runs: list[Path], code: Path, args: StoolArgs) -> None:
        if args.partition == "nowhere":
            raise UserError("refused")
        made.append(([run.name for run in runs], args))
        for number, run in enumerate(runs):
            records.append(run, "submit", job=f"{len(made)}_{number}", launcher="slurm", host="here")
            records.append(run, "end", job=f"{len(made)}_{number}", state=records.FAILED, exit=1, reason="")

    monkeypatch.setattr(launch, "_submit", submit)
    return made


def test_resume_keeps_what_each_run_was_launched_with(
    submissions: list,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "plans_by", lambda code, cwd, launches: [{"ranks": 1}] * len(launches))
    folder = tmp_path / "sweep"
    words = [word for word in tiny_words("crossbert", corpus, folder) if "dump_dir=" not in word]
    launch.launch(read_request([*START, "ngpu=0", f"dump_dir={folder}", "sweep.seed=1,2,3", "--", *words]))
    launch.resume(folder / "seed=2", ["mem=5G"], [], False)
    launch.resume(folder, ["time=90"], ["optim.lr=0.5"], False)
    assert [(runs, args.mem, args.time) for runs, args in submissions[2:]] == [
        (["seed=1", "seed=3"], "", "90"),
        (["seed=2"], "5G", "90"),
    ]
    told = [records.read_launch(folder / name) for name in ("seed=1", "seed=2")]
    assert [(about["args"]["mem"], about["words"]) for about in told] == [
        ("", ["optim.lr=0.5"]), ("5G", ["optim.lr=0.5"]),
    ]  # fmt: skip

    # A launch that is refused leaves what was there; a run that was removed holds up no other.
    with pytest.raises(UserError, match="refused"):
        launch.resume(folder, ["partition=nowhere"], [], False)
    assert [records.read_launch(folder / "seed=1")["args"][key] for key in ("time", "partition")] == ["90", ""]
    shutil.rmtree(folder / "seed=3")
    capsys.readouterr()
    launch.resume(folder, [], [], False)
    assert "seed=3: its folder is gone" in capsys.readouterr().out
    assert [runs for runs, _ in submissions[4:]] == [["seed=1"], ["seed=2"]]
    status.status([folder])
    status.cancel([folder])
    assert "seed=3: not submitted\n" in capsys.readouterr().out


@pytest.mark.slow
def test_resume_is_checked_by_the_code_that_runs(
    submissions: list, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in tiny_words("crossbert", corpus, tmp_path / "run") if "dump_dir=" not in word]
    launch.launch(read_request([*START, "ngpu=0", "dump_dir=run", "--", *words]))
    monkeypatch.chdir("/")  # the paths of the config are those of the folder it was launched in
    told = records.read_launch(tmp_path / "run")
    train = Path(told["code"]) / "apps/crossbert/train.py"
    args = train.read_text()
    head = "class CrossBertTrainArgs(PretrainingArgs):"
    train.write_text(args.replace(head, f"{head}\n    then: int = 0", 1))
    assert train.read_text() != args
    launch.resume(tmp_path / "run", [], ["then=3", "steps=77"], False)
    told = records.read_launch(tmp_path / "run")
    assert (told["words"], told["plan"]["steps"]) == (["then=3", "steps=77"], 77)
    with pytest.raises(UserError, match="unknown key then"):
        launch.resume(tmp_path / "run", ["time=90"], [], True)
    assert records.read_launch(tmp_path / "run") == told
    assert len(submissions) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nodes", "'nodes' is not of the form key=value"),
        ("dry_run=true", "cannot change its dry_run"),
        ("dump_dir=x", "cannot change its dump_dir"),
        ("launcher=debug", "resume submits to slurm or local"),
        ("node=3", "unknown key node: did you mean nodes"),
    ],
)
def test_changes_that_resume_refuses(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        launch.parse_changes(to_dict(StoolArgs(script="s", time="10")), [change])


def test_without_sbatch_it_says_so(tmp_path: Path, corpus: Path) -> None:
    words = tiny_words("crossbert", corpus, tmp_path / "run")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("timeout", "git"):
        (tools / name).symlink_to(shutil.which(name) or "/usr/bin/" + name)
    done = stool(*START, "ngpu=0", "--", *words, PATH=tools)
    assert done.returncode == 2
    assert "error: sbatch not found: is this a login node?" in done.stderr


def test_help_lists_the_fields() -> None:
    done = stool("--help")
    assert done.returncode == 0
    assert "max_restarts: int = 50" in done.stdout
    assert "eval.dependency: str = 'singleton'" in done.stdout


def test_jobs_take_the_snapshots_modules(tmp_path: Path) -> None:
    for name in ("code", "cwd"):
        (tmp_path / f"{name} of mine/lingua").mkdir(parents=True)
        (tmp_path / f"{name} of mine/lingua/__init__.py").write_text(f"print({name!r})\n")
    lines = [*submit.environment_lines(tmp_path / "code of mine"), f"{sys.executable} -m lingua"]
    command = ["bash", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path / "cwd of mine", capture_output=True, text=True)
    assert done.stdout == "code\n"


# --- snapshots


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two files, as if the library lay there."""
    source = tmp_path / "source"
    (source / "lingua").mkdir(parents=True)
    (source / "lingua/a.py").write_text("a = 1\n")
    (source / "gone.py").write_text("")
    (source / ".gitignore").write_text("data/\n")
    monkeypatch.setattr(snapshot, "root", lambda: source)
    return source


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_a_snapshot_is_the_code_as_it_is(repository: Path, tmp_path: Path) -> None:
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    (repository / "lingua/a.py").write_text("a = 2\n")  # changed
    (repository / "new file.py").write_text("b = 1\n")  # neither added nor ignored
    (repository / "gone.py").unlink()
    (repository / "data").mkdir()
    (repository / "data/big.bin").write_bytes(b"0" * 10_000)  # ignored
    for path in ("run/stool/launch.json", "run/train.log", "sweep/stool/code/0001/lingua/a.py", "sweep/sweep.jsonl"):
        (repository / "out" / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / "out" / path).write_text("")
    code = tmp_path / "code/0001"
    code.parent.mkdir()
    info = snapshot.take(code, 1.0)
    files = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    assert files == {".gitignore", "lingua/a.py", "new file.py", "git.diff", "snapshot.json"}
    assert (code / "lingua/a.py").read_text() == "a = 2\n"
    assert "-a = 1\n+a = 2\n" in (code / "git.diff").read_text()
    head = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert info["commit"] == head.stdout.strip()
    assert json.loads((code / "snapshot.json").read_text()) == info
    assert snapshot.next_folder(tmp_path) == tmp_path / "code/0002"


def test_a_snapshot_of_files_in_any_encoding(repository: Path, tmp_path: Path) -> None:
    latin = "caf\u00e9".encode("latin-1")
    (repository / "notes.txt").write_bytes(latin + b"\r\n")
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    (repository / "notes.txt").write_bytes(latin + b" au lait\r\n")
    (repository / os.fsdecode(latin + b".py")).write_text("")
    code = tmp_path / "code"
    snapshot.take(code, 1.0)
    assert (code / "notes.txt").read_bytes() == latin + b" au lait\r\n"
    assert (code / os.fsdecode(latin + b".py")).is_file()
    git(repository, "checkout", "-q", "notes.txt")
    git(repository, "apply", str(code / "git.diff"))
    assert (repository / "notes.txt").read_bytes() == latin + b" au lait\r\n"


def test_a_snapshot_without_git_is_the_packages(repository: Path, tmp_path: Path) -> None:
    (repository / "lingua/__pycache__").mkdir()
    (repository / "lingua/__pycache__/a.pyc").write_text("")
    info = snapshot.take(tmp_path / "code", 1.0)
    assert info["commit"] is None
    assert (tmp_path / "code/lingua/a.py").is_file()
    assert not (tmp_path / "code/gone.py").exists()
    assert not (tmp_path / "code/lingua/__pycache__").exists()


def test_a_snapshot_that_is_too_large_names_what_is(repository: Path, tmp_path: Path) -> None:
    (repository / "lingua/weights.bin").write_bytes(b"0" * 2_000_000)
    with pytest.raises(UserError, match=r"more than snapshot_mb=1; the largest: lingua/weights.bin \(2.0 MB\)"):
        snapshot.take(tmp_path / "code", 1.0)
    assert not (tmp_path / "code").exists()


# --- records, and the decision at the end


def submitted(run: Path, job: str = "7", launcher: str = "slurm", **about: object) -> None:
    records.append(run, "submit", job=job, launcher=launcher, host="here", **about)
    if not (run / "stool/launch.json").exists():
        plan = {"steps": 30, "ranks": 4}
        records.write_launch(run, {"args": to_dict(StoolArgs(script="s", time="10")), "plan": plan, "sweep": None})


def started(run: Path, job: str = "7", restart: int = 0, pid: int = 1) -> None:
    folder = run / "stool/logs" / f"{job}_{restart}"
    records.append(run, "start", job=job, restart=restart, host="here", pid=pid, nodes=["n0"], logs=str(folder))


def test_the_state_by_the_records(tmp_path: Path) -> None:
    assert records.summary(tmp_path)["state"] is None
    started(tmp_path)  # may come before the submission is written down
    submitted(tmp_path)
    assert records.summary(tmp_path)["state"] == records.RUNNING
    records.append(tmp_path, "end", job="7", state=records.REQUEUED, exit=140, reason="stopped by SIGUSR2")
    started(tmp_path, restart=1)
    about = records.summary(tmp_path)
    assert (about["state"], about["restarts"]) == (records.RUNNING, 1)
    with (tmp_path / "stool/jobs.jsonl").open("a") as file:
        file.write('{"event": "end", "job": "7", "sta')  # cut off by a kill
    assert records.summary(tmp_path)["state"] == records.RUNNING


def test_a_new_submission_begins_anew(tmp_path: Path) -> None:
    submitted(tmp_path)
    records.append(tmp_path, "end", job="7", state=records.FAILED, exit=1, reason="exit status 1")
    submitted(tmp_path, "8")
    records.append(tmp_path, "cancel", job="7")  # late, and of the job before
    about = records.summary(tmp_path)
    assert (about["state"], about["job"], about["restarts"]) == (records.SUBMITTED, "8", 0)


ARGS = {"max_restarts": 2, "requeue_on_crash": False}


@pytest.mark.parametrize(
    ("code", "restart", "args", "cancelled", "state", "reason"),
    [
        (0, 0, ARGS, False, "FINISHED", "finished"),
        (0, 0, ARGS, True, "FINISHED", "finished"),
        (140, 0, ARGS, False, "REQUEUED", "stopped by SIGUSR2"),
        (143, 1, ARGS, False, "REQUEUED", "stopped by SIGTERM"),
        (140, 2, ARGS, False, "FAILED", "stopped by SIGUSR2; no restart left of max_restarts=2"),
        (130, 0, ARGS, False, "CANCELLED", "stopped by SIGINT"),
        (143, 0, ARGS, True, "CANCELLED", "stopped by SIGTERM"),
        (1, 0, ARGS, False, "FAILED", "exit status 1"),
        (137, 0, ARGS, False, "FAILED", "killed by signal 9"),
        (137, 0, ARGS, True, "CANCELLED", "killed by signal 9"),
        (1, 1, ARGS | {"requeue_on_crash": True}, False, "REQUEUED", "exit status 1"),
        (1, 2, ARGS | {"requeue_on_crash": True}, False, "FAILED", "exit status 1; no restart left of max_restarts=2"),
        (2, 0, ARGS | {"requeue_on_crash": True}, False, "FAILED", "user error"),
    ],
)
def test_what_becomes_of_a_run_whose_ranks_have_ended(
    code: int, restart: int, args: dict, cancelled: bool, state: str, reason: str
) -> None:
    assert decide(code, restart, args, cancelled) == (state, reason)


def test_why_slurm_ends_a_job() -> None:
    line = "slurmstepd-n0: error: *** JOB 4 ON n0 CANCELLED AT 2026-01-31T00:59:37 {}***"
    assert ENDING.search(line.format("DUE TO TIME LIMIT "))[1] == "TIME LIMIT"
    assert ENDING.search(line.format("DUE TO JOB REQUEUE "))[1] == "JOB REQUEUE"
    assert ENDING.search(line.format(""))[1] is None


def test_which_ranks_srun_names() -> None:
    found = SRUN_FAILURE.search("srun: error: n1: tasks 0-2,5: Exited with exit code 2")
    assert (found[1], _numbers(found[2]), found[3]) == ("n1", [0, 1, 2, 5], "Exited with exit code 2")


# --- the scheduler's word


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of made-up squeue, sacct and scontrol: shell scripts that the test writes."""
    folder = tmp_path / "clients"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("squeue", "sacct", "scontrol", "scancel"):
        client(folder, name, f"echo {name}: error: no >&2; exit 1")
    return folder


def client(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_squeue_first_and_sacct_for_the_rest(clients: Path) -> None:
    client(clients, "squeue", "echo '7|RUNNING|None'; echo '9_1|PENDING|Resources'; echo '99|RUNNING|None'")
    client(clients, "sacct", "echo '8|CANCELLED by 1000'; echo '9_[2-4%2]|PENDING'; echo '9_0|COMPLETED'")
    assert scheduler.states(["7", "8", "9_0", "9_1", "9_3", "10"]) == {
        "7": ("RUNNING", ""),
        "8": ("CANCELLED", ""),
        "9_0": ("COMPLETED", ""),
        "9_1": ("PENDING", "Resources"),
        "9_3": ("PENDING", ""),
    }


def test_without_accounting_squeue_is_enough(clients: Path) -> None:
    client(clients, "squeue", "echo '7|RUNNING|None'")
    assert scheduler.states(["7", "8"]) == {"7": ("RUNNING", "")}


def test_neither_answers(clients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 0.5)
    client(clients, "squeue", "sleep 10")
    with pytest.raises(scheduler.SchedulerError, match=r"no answer in 0.5 s; sacct.*sacct: error: no"):
        scheduler.states(["7"])


@pytest.mark.parametrize(
    ("said", "before", "state"),
    [
        ("7|PENDING|Priority", "submit", "PENDING"),
        ("7|RUNNING|None", "submit", "RUNNING"),
        ("7|PENDING|BeginTime", "requeue", "REQUEUED"),
        ("7|NODE_FAIL|None", "start", "FAILED"),
        ("7|TIMEOUT|None", "start", "FAILED"),
        ("7|CANCELLED|None", "start", "CANCELLED"),
        ("8|RUNNING|None", "start", "LOST"),
        ("7|COMPLETED|None", "start", "LOST"),
        ("7|RUNNING|None", "cancel", "CANCELLING"),
        ("8|RUNNING|None", "cancel", "CANCELLED"),
        ("7|RUNNING|None", "end", "FINISHED"),
    ],
)
def test_records_and_scheduler_together(clients: Path, tmp_path: Path, said: str, before: str, state: str) -> None:
    client(clients, "squeue", f"echo '{said}'")
    client(clients, "sacct", "true")
    run = tmp_path / "run"
    submitted(run)
    if before != "submit":
        started(run)
    if before == "requeue":
        records.append(run, "end", job="7", state=records.REQUEUED, exit=140, reason="stopped by SIGUSR2")
    if before == "cancel":
        records.append(run, "cancel", job="7")
    if before == "end":
        records.append(run, "end", job="7", state=records.FINISHED, exit=0, reason="finished")
    assert status.run_state(run) == state


def test_a_run_on_this_machine_that_waits_for_its_turn(tmp_path: Path) -> None:
    """One queue runs the points of a sweep: that it lives says nothing of those that it has not come to."""
    first, second = tmp_path / "first", tmp_path / "second"
    here, queue = socket.gethostname(), os.getpid()
    for number, run in enumerate((first, second)):
        records.append(run, "submit", job=f"local{queue}_{number}", launcher="local", host=here, code="")
    records.append(first, "start", job=f"local{queue}_0", restart=0, host=here, pid=queue, nodes=[here], logs="")
    found = status.states([first, second])
    assert [found[run]["state"] for run in (first, second)] == [records.RUNNING, records.PENDING]
    records.append(second, "cancel", job=f"local{queue}_1")
    assert status.run_state(second) == records.CANCELLING


def test_a_run_that_ends_while_the_scheduler_is_asked(clients: Path, tmp_path: Path) -> None:
    submitted(tmp_path)
    end = json.dumps({"event": "end", "job": "7", "state": records.FINISHED, "exit": 0, "reason": "finished"})
    client(clients, "squeue", f"echo '{end}' >> {tmp_path}/stool/jobs.jsonl; echo '7|COMPLETED|None'")
    assert status.run_state(tmp_path) == records.FINISHED


def test_the_index_of_a_sweep_has_what_the_scheduler_says(clients: Path, tmp_path: Path) -> None:
    client(clients, "squeue", "echo '8|RUNNING|None'")
    submitted(tmp_path / "seed=1")
    records.append(tmp_path / "seed=1", "cancel", job="7")  # while it waited: no job will write down its end
    (tmp_path / "stool").mkdir()
    sweep.refresh(tmp_path, [{"name": "seed=1", "values": {"seed": "1"}}])
    assert sweep.runs(tmp_path)[0]["state"] == records.CANCELLING
    status.status([tmp_path])
    assert sweep.runs(tmp_path)[0]["state"] == records.CANCELLED


def test_status_says_where_it_failed(clients: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    submitted(run)
    started(run)
    (run / "metrics.jsonl").write_text('{"step": 20, "loss": 5.25, "tokens_per_second": 1234.5}\n{"step": 21, "valid/')
    (run / "train.log").write_text("first\nlast line\n\n")
    failure = {"rank": 3, "node": "n1", "cause": "Killed", "line": "loss went up"}
    records.append(run, "end", job="7", state=records.FAILED, exit=137, reason="killed by signal 9", failure=failure)
    status.status([run])
    assert capsys.readouterr().out.splitlines() == [
        "run  state   job  step   loss    tokens/s  restarts",
        "run  FAILED  7    20/30  5.2500  1,234     0",
        "    failure: killed by signal 9; first rank 3 on n1: Killed; its last line: loss went up",
        "    log: last line",
    ]


def test_a_job_that_failed_before_its_ranks(clients: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    submitted(tmp_path)
    client(clients, "squeue", "echo '7|FAILED|None'")
    said = "line 19: /no/python: No such file or directory"
    (tmp_path / "stool/submitit").mkdir()
    (tmp_path / "stool/submitit/7_0_log.out").write_text(f"{said}\n")
    status.status([tmp_path])
    assert f"failure: FAILED by the scheduler; the job's last line: {said}\n" in capsys.readouterr().out
    status.logs(tmp_path, None, follow=False)
    assert capsys.readouterr().out == f"{said}\n"
    with pytest.raises(UserError, match=r"--rank 4: .* has 4 ranks, counted from 0"):
        status.logs(tmp_path, 4, follow=False)


def test_ranks_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args = to_dict(StoolArgs(script="s", launcher="local", ngpu=0, tasks_per_node=2, cpus=3))
    ranks = Ranks(["sh", "-c", "echo $RANK $OMP_NUM_THREADS; kill -KILL $$"], {"args": args}, tmp_path / "1")
    assert ranks.wait(lambda: None) == 137
    failure = ranks.failure(137)
    assert failure is not None
    assert (failure["rank"], failure["cause"], failure["line"]) == (0, "SIGKILL", "0 3")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # by a line of setup
    assert Ranks(["sh", "-c", "echo $OMP_NUM_THREADS"], {"args": args}, tmp_path / "2").wait(lambda: None) == 0
    assert (tmp_path / "2/rank_00001.out").read_text() == "5\n"


def test_a_signal_before_there_are_ranks_reaches_them(tmp_path: Path) -> None:
    args = to_dict(StoolArgs(script="json.tool", launcher="local", ngpu=0))
    launched = {"args": args, "words": [], "code": "x", "sweep": None}
    records.write_launch(tmp_path, launched)
    job = Job(tmp_path, "local1_0")
    job._on_signal(signal.SIGTERM, None)
    assert job._one_start() == (records.REQUEUED, 143)


def test_a_job_submitted_from_a_job_takes_none_of_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_CONF": "x", "RANK": "2"}.items():
        monkeypatch.setenv(key, value)
    before = dict(os.environ)
    with submit._outside_of_a_job():
        assert {"SLURM_JOB_ID", "SLURM_NNODES", "RANK"}.isdisjoint(os.environ)
        assert os.environ["SLURM_CONF"] == "x"
    assert dict(os.environ) == before


def test_a_rank_that_srun_never_started_is_no_success(tmp_path: Path) -> None:
    args = to_dict(StoolArgs(script="s", launcher="local", ngpu=0))
    ranks = Ranks(["true"], {"args": args}, tmp_path)
    (tmp_path / "srun.log").write_text("srun: error: task 0 launch failed: Slurmd could not connect IO\n")
    assert ranks.wait(lambda: None) == 1


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder of this launcher"):
        status.status([tmp_path])


# --- evaluations


def test_a_request_for_an_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, checkpoint = tmp_path / "run", tmp_path / "run/checkpoints/0000000010"
    launch_evaluation(run, checkpoint)  # not launched by this launcher: nothing to do
    assert not run.exists()
    checkpoint.mkdir(parents=True)
    records.write_launch(run, {"args": to_dict(StoolArgs(script="s", time="10"))})
    launch_evaluation(run, checkpoint)  # no evaluation wanted
    assert evaluations(run) == {}
    records.write_launch(run, {"args": {"eval": {"script": "apps.crossbert.eval"}}})
    launch_evaluation(run, str(checkpoint))
    assert evaluations(run) == {"0000000010": {"state": "REQUESTED", "checkpoint": str(checkpoint)}}
    assert (checkpoint / LEASE).is_file()
    elsewhere = as_path("memory://bucket/0000000020")
    launch_evaluation(run, elsewhere)
    assert evaluations(run)["0000000020"]["checkpoint"] == str(elsewhere)
    assert (elsewhere / LEASE).exists()
    (run / "stool/launch.json").write_text("{")
    launch_evaluation(run, checkpoint)
    assert "no evaluation of" in caplog.text


def test_a_checkpoint_in_line_for_evaluation_is_not_removed(tmp_path: Path) -> None:
    from lingua.checkpoint import remove_old
    from lingua.stool.evaluation import release

    records.write_launch(tmp_path, {"args": {"eval": {"script": "apps.crossbert.eval"}}})
    root = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        folder = root / f"{step:010d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "COMPLETE").write_text(json.dumps({"state.json": {"bytes": 2, "sha256": "0"}}))
        if step < 30:
            launch_evaluation(tmp_path, folder)
    remove_old(root, 1)
    assert len([*root.iterdir()]) == 3
    release(str(root / "0000000010"))
    remove_old(root, 1)
    assert [path.name for path in sorted(root.iterdir())] == ["0000000020", "0000000030"]


def test_evaluations_on_this_machine_wait_for_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = to_dict(StoolArgs(script="s", launcher="local", eval=EvaluationArgs(script="json.tool")))
    records.write_launch(tmp_path, {"args": args, "cwd": str(tmp_path)})
    (tmp_path / "stool/evaluations").mkdir()
    found = {"state": "SUBMITTED", "checkpoint": str(tmp_path)}
    records.write_json(tmp_path / "stool/evaluations/0000000010.json", found)
    with (tmp_path / "stool/evaluations/turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "lingua.stool.evaluation", str(tmp_path), "0000000010"]
        process = subprocess.Popen(command, env=environment() | {"PYTHONPATH": str(ROOT)})
        opened = Path(f"/proc/{process.pid}/fd")
        wait(lambda: any(os.readlink(file) == turn.name for file in opened.iterdir()), 60)
        time.sleep(0.5)
        assert evaluations(tmp_path)["0000000010"]["state"] == "SUBMITTED"
    assert process.wait(60) == 2
    about = evaluations(tmp_path)["0000000010"]
    assert about["state"] == "FAILED"  # json.tool takes no ckpt=
    assert about["reason"].startswith("exit status 2: ")


def test_an_evaluation_whose_job_is_gone(clients: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    submitted(tmp_path)
    checkpoint = tmp_path / "checkpoints/0000000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / LEASE).write_text("{}")
    path = tmp_path / "stool/evaluations/0000000010.json"
    path.parent.mkdir()
    found = {"state": "RUNNING", "checkpoint": str(checkpoint), "job": "8"}
    records.write_json(path, found)
    client(clients, "squeue", "echo '7|RUNNING|None'; echo '8|RUNNING|None'")
    status.status([tmp_path])
    assert "evaluations: 10 running\n" in capsys.readouterr().out
    client(clients, "squeue", "echo '7|RUNNING|None'; echo '8|TIMEOUT|None'")
    status.status([tmp_path])
    assert "evaluations: 10 failed (job 8: TIMEOUT by the scheduler)\n" in capsys.readouterr().out
    assert not (checkpoint / LEASE).exists()
