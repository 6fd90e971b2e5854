"""Starting runs: check everything, write the run folders, submit; and going on with runs that are there."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lingua.args import build, parse, to_dict, to_yaml
from lingua.errors import UserError
from lingua.stool import records, snapshot, submit, sweep
from lingua.stool.args import Request, StoolArgs, as_text, quote, script_words
from lingua.stool.job import local_job, run_job
from lingua.stool.plan import describe, load_script, make_plan, plans_by, resolve
from lingua.stool.status import run_state

CONFIG = "config.yaml"
FIXED = ("script", "config", "dump_dir", "dry_run")  # what a resumed launch does not change


def launch(request: Request) -> None:
    """Launch a run or a sweep, or print what would be submitted. Raises UserError before anything is submitted."""
    args, words = request.args, list(request.words)
    if args.dump_dir:
        given = [word for word in words if word.startswith("dump_dir=")]
        if given:
            raise UserError(f"dump_dir={args.dump_dir} and, after --, {given[0]}: give one of them")
    found = sweep.points(request.sweep, request.sweep_file) if request.is_sweep else [{}]
    if any("dump_dir" in point for point in found):
        raise UserError("sweep: dump_dir cannot be swept: each run has a folder of its own in that of the sweep")
    swept = [f"{key}={value}" for key, value in found[0].items()]
    if args.dump_dir:
        words.append(f"dump_dir={args.dump_dir}")
    script, config = resolve(args, words + swept)
    folder = Path(config.dump_dir).absolute()
    if "%" in str(folder) and args.launcher == "slurm":
        raise UserError(f"dump_dir={folder}: SLURM puts something else for a % in the path of a log; use another name")
    names = sweep.names(found) if request.is_sweep else [""]
    configs, plans = {}, []
    for name, point in zip(names, found, strict=True):
        run = folder / name if name else folder
        own = [f"{key}={value}" for key, value in point.items()]
        own = [*words, *own, f"dump_dir={os.path.join(config.dump_dir, name)}"] if name else words
        config_of_run = parse(script.config_class, script_words(args.config, own))
        configs[run] = to_yaml(config_of_run)  # before the plan fills in what the tokenizer says
        plans.append(make_plan(script, config_of_run, args))
    if args.eval.script:
        _check_evaluation(args)
    args.name = args.name or folder.name
    if args.dry_run:
        print(_executor(folder, records.home(folder) / "code" / "0001", args).script(len(names) if names[0] else None))
        print("".join(f"# {line}\n" for line in describe(plans[0], args, len(names))), end="")
        return
    if args.launcher == "debug":
        if request.is_sweep:
            raise UserError("launcher=debug runs one run, not a sweep")
        _debug(folder, script.function, config)
        return
    runs = _new_runs(folder, configs, request.is_sweep)
    if not runs:
        print("nothing to submit")
        return
    for line in describe(plans[0], args, len(names)):
        print(line)
    code = snapshot.next_folder(records.home(folder))
    info = snapshot.take(code, args.snapshot_mb)
    for name in filter(None, (args.script, args.eval.script)):
        snapshot.check_module(code, load_script(name).module)
    lines = [{"name": name, "values": point} for name, point in zip(names, found, strict=True)]
    for number, (run, text) in enumerate(configs.items()):
        if run not in runs:
            continue
        records.write_launch(run, _launch_record(args, code, info, folder if names[0] else None, plans[number]))
        (records.home(run) / CONFIG).write_text(text)
    if request.is_sweep:
        sweep.refresh(folder, lines)
    _submit(folder, runs, code, args)


def _launch_record(
    args: StoolArgs, code: Path, info: dict[str, Any], sweep_folder: Path | None, plan: dict[str, Any]
) -> dict[str, Any]:
    return {
        "args": to_dict(args),
        "words": [],  # for the script, beyond stool/config.yaml
        "code": str(code),
        "commit": info["commit"],
        "changed": info["changed"],
        "cwd": os.getcwd(),
        "sweep": str(sweep_folder) if sweep_folder else None,
        "plan": plan,
        "command": quote(["python", "-m", "lingua.stool", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _check_evaluation(args: StoolArgs) -> None:
    script = load_script(args.eval.script)
    parse(script.config_class, script_words(args.eval.config, ["ckpt=CHECKPOINT", "out=FOLDER", *args.eval.words]))


def _new_runs(folder: Path, configs: dict[Path, str], is_sweep: bool) -> list[Path]:
    """The runs to submit: of a sweep that is there, those that have not finished and are not under way."""
    if not is_sweep:
        refused = records.summary(folder)["state"] is None and _names(folder) <= {"stool"}  # at the last try
        if _names(folder) and not refused:
            raise UserError(
                f"{folder} is there already and is left as it is. To go on with it: python -m lingua.stool resume "
                f"{folder}; for another run give a new dump_dir"
            )
        return [folder]
    if _names(folder) - {"stool"} and not (folder / sweep.INDEX).is_file():
        raise UserError(f"{folder} is there already and is no sweep; give a new dump_dir")
    runs = []
    for run, text in configs.items():
        before = records.home(run) / CONFIG
        if records.summary(run)["state"] is None:
            runs.append(run)
            continue
        if before.read_text() != text:
            raise UserError(f"{run} is there already with another config ({before}); give the sweep a new dump_dir")
        state = run_state(run)
        if state in records.STOPPED:
            runs.append(run)
        else:
            print(f"{run.name}: {state.lower()}, left alone")
    return runs


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _executor(folder: Path, code: Path, args: StoolArgs) -> submit._Executor:
    return submit.executor(records.home(folder) / "submitit", args.name, code, args, args, args.dependency)


def _submit(folder: Path, runs: list[Path], code: Path, args: StoolArgs) -> None:
    if args.launcher == "slurm":
        jobs = submit.submit_slurm(_executor(folder, code, args), run_job, [(str(run),) for run in runs])
    else:
        words = ["-m", "lingua.stool.job", str(args.max_parallel), *map(str, runs)]
        queue = submit.submit_local(words, records.home(folder) / "local.log", code, args)
        jobs = [local_job(queue, number) for number in range(len(runs))]
    for run, job in zip(runs, jobs, strict=True):
        records.append(run, "submit", job=job, launcher=args.launcher, code=str(code), host=socket.gethostname())
        print(f"submitted {job}: {run}")
    if (folder / sweep.INDEX).is_file():
        sweep.refresh(folder)
    print(f"follow it: python -m lingua.stool status {folder}")


def _debug(folder: Path, function: Any, config: Any) -> None:
    """Run in this process by submitit's debug executor, which opens pdb where an exception was raised."""
    import submitit

    submitit.DebugExecutor(records.home(folder) / "debug").submit(_in_process, function, config).result()


def _in_process(function: Any, config: Any) -> None:
    try:
        function(config)
    except UserError as error:  # nothing to debug
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def resume(folder: Path, changes: list[str], words: list[str], new_code: bool) -> None:
    """Submit again what has not finished of a run or a sweep, in the same folders.

    Args:
        changes: ``key=value`` of the launch, such as ``nodes=1 time=4:00:00``.
        words: ``key=value`` for the script, such as ``resume.allow=[optim.lr]``.
        new_code: take a new snapshot; otherwise the code of the last launch runs.

    Raises:
        UserError: a run that is still under way.
    """
    folder = folder.absolute()
    is_sweep = (folder / sweep.INDEX).is_file()
    runs = []
    for run in sweep.expand([folder]):
        state = run_state(run)
        if is_sweep and not (records.home(run) / "launch.json").is_file():
            print(f"{run.name}: its folder is gone; the command of the launch makes it again")
        elif state in records.STOPPED:
            runs.append(run)
        elif is_sweep or state == records.FINISHED:
            print(f"{run.name}: {state.lower()}, left alone")
        else:
            raise UserError(f"{run} is {state}: cancel it first (python -m lingua.stool cancel {run})")
    if not runs:
        print("nothing to submit")
        return
    # All of it is checked before anything is written, by the code that will run.
    launches = {run: _relaunch(run, changes, words, new_code) for run in runs}
    for old_code in {launch["code"] for launch in launches.values()}:
        same = {run: launch for run, launch in launches.items() if launch["code"] == old_code}
        told = [(one["args"], [f"config={records.home(run)}/{CONFIG}", *one["words"]]) for run, one in same.items()]
        code = snapshot.root() if new_code else Path(old_code)
        cwd = next(iter(same.values()))["cwd"]
        for run, plan in zip(same, plans_by(code, cwd, told), strict=True):
            launches[run]["plan"] = plan
    if new_code:
        code = snapshot.next_folder(records.home(folder))
        snapshot.take(code, launches[runs[0]]["args"]["snapshot_mb"])
        launches = {run: launch | {"code": str(code)} for run, launch in launches.items()}
    # Runs of a sweep that was extended later have code and resources of their own, and a job has one of each.
    groups: list[list[Path]] = []
    for run, launch in launches.items():
        for group in groups:
            if all(launches[group[0]][key] == launch[key] for key in ("code", "args")):
                group.append(run)
                break
        else:
            groups.append([run])
    for group in groups:
        before = {run: records.read_launch(run) for run in group}
        for run in group:
            records.write_launch(run, launches[run])
        first = launches[group[0]]
        try:
            _submit(folder, group, Path(first["code"]), build(StoolArgs, ("launch.json", first["args"])))
        except UserError:  # refused: the next try does not begin from it
            for run, launch in before.items():
                records.write_launch(run, launch)
            raise


def _relaunch(run: Path, changes: list[str], words: list[str], new_code: bool) -> dict[str, Any]:
    """The launch of a run with what is changed."""
    launch = records.read_launch(run)
    if not new_code and not Path(launch["code"]).is_dir():
        raise UserError(f"{launch['code']}: the code {run} was launched with is gone; --new-code takes that of today")
    args = to_dict(parse_changes(launch["args"], changes))
    return launch | {"args": args, "words": [*launch["words"], *words]}


def parse_changes(old: dict[str, Any], changes: list[str]) -> StoolArgs:
    """The launch of before with ``key=value`` changed. Raises UserError."""
    from omegaconf import OmegaConf

    for word in changes:
        key, equals, _ = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is not of the form key=value")
        if key in FIXED:
            raise UserError(f"{word}: resume goes on with a run as it is, and cannot change its {key}")
    args = build(
        StoolArgs,
        ("the launch before", old),
        ("the command line", OmegaConf.to_container(OmegaConf.from_dotlist(as_text(changes)))),
    )
    if args.launcher == "debug":
        raise UserError("launcher=debug runs nothing again: resume submits to slurm or local")
    return args
