"""MTEB of an embedding model: ``python -m apps.embed.eval ckpt=RUN benchmark='MTEB(eng, v2)'`` (docs/embeddings.md).

Tasks run through the ``mteb`` package, the largest last, and each is kept as soon as it is done: the same command goes
on where it stopped.
"""

from __future__ import annotations

import json
import math
import platform
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apps.embed.models import Model, ModelArgs
from apps.embed.mteb_results import NOT_ASKED, write_mteb_results
from lingua.args import cli, to_dict
from lingua.checkpoint import resolve
from lingua.distributed import find_ranks
from lingua.errors import UserError
from lingua.evaluation.results import RESULTS, writable_folder, write_whole
from lingua.features import run_folder
from lingua.files import optional
from lingua.storage import is_local

REQUIREMENTS = "requirements-eval.txt"


@dataclass
class MtebArgs(ModelArgs):
    """Evaluate an embedding model on MTEB; writes results.json and results.md, and prints the table."""

    benchmark: str = "MTEB(eng, v2)"  # any of mteb's text benchmarks by name
    tasks: list[str] | None = None  # some of its tasks by name; none: all
    task_types: list[str] | None = None  # only tasks of these types, such as [STS,Retrieval]
    data: str | None = None  # folder with copies of the datasets, each under its name on the hub; none: the hub
    out: str | None = None  # folder of the results; none: RUN/eval/mteb, or eval/mteb


def evaluate(args: MtebArgs) -> dict[str, Any]:
    """Run every task that has no result yet, write and print the results, and return them.

    A task that fails does not stop the others; its traceback is written to ``errors/``.

    Raises:
        UserError: no such model, benchmark or task; or, once all others are done and written, tasks without a score.
    """
    mteb = optional("mteb", "MTEB", REQUIREMENTS)
    if find_ranks()[1] > 1:
        raise UserError("MTEB runs in one process: start it without torchrun, one for each model")
    from apps.embed.mteb_model import MtebModel, benchmark_tasks, chosen_tasks

    benchmark = benchmark_tasks(args.benchmark)
    tasks = chosen_tasks(benchmark, args.tasks, args.task_types)
    root = writable_folder(_root(args))
    model = MtebModel(Model(args))
    meta = model.mteb_model_meta
    cache = mteb.ResultCache(root / "tasks")
    benchmark_folder = re.sub(r"\W+", "_", args.benchmark).strip("_")
    out = writable_folder(root / meta.model_name_as_path() / meta.revision / benchmark_folder)
    results = {
        "benchmark": args.benchmark,
        "model": {"name": meta.name, "identity": meta.revision, "source": args.source()},
        "config": to_dict(args),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "mteb": mteb.__version__},
        "task_types": {task.metadata.name: task.metadata.type for task in benchmark},
        "tasks": {},
        "missing": {t.metadata.name: "not run yet" if t in tasks else NOT_ASKED for t in benchmark},
    }
    keep_scores(results, out)
    failed = []
    for number, task in enumerate(tasks, start=1):
        name = task.metadata.name
        print(f"{number} of {len(tasks)}: {name} ({task.metadata.type})", flush=True)
        try:
            results["tasks"][name] = run_task(task, model, cache, args.data)
            del results["missing"][name]
        except Exception as error:  # of mteb, datasets, the hub and what they stand on
            failed.append(name)
            results["missing"][name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"  no score: {results['missing'][name]}", flush=True)
            write_whole(writable_folder(out / "errors") / f"{name}.txt", traceback.format_exc().encode())
            if task.data_loaded:
                task.unload_data()
        results["encoded_now"] = {"texts_without_token": model.empty, "texts_cut": model.model.truncated}
        table = write_mteb_results(results, out)
    print(f"\n{table}\nwritten to {out}/", flush=True)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(tasks)} tasks have no score ({', '.join(failed)}); their tracebacks are in "
            f"{out}/errors/. The same command tries these again and keeps the rest"
        )
    return results


def keep_scores(results: dict[str, Any], out: Path) -> None:
    """Take over what an earlier command found for tasks that are not asked for now, on the same data."""
    if not (out / RESULTS).is_file():
        return
    earlier = json.loads((out / RESULTS).read_text())
    if (
        earlier["versions"]["mteb"] != results["versions"]["mteb"]
        or earlier["config"]["data"] != results["config"]["data"]
    ):
        return
    for name, found in earlier["tasks"].items():
        if results["missing"].get(name) == NOT_ASKED:
            results["tasks"][name] = found
            del results["missing"][name]


def run_task(task: Any, model: Any, cache: Any, data: str | None) -> dict[str, Any]:
    """One task's score, kept in ``cache`` or computed now.

    Raises:
        Exception: what mteb and the libraries below it raise.
    """
    import mteb

    from apps.embed.mteb_model import use_local_data

    if data is not None:
        use_local_data(task, Path(data))
    path, strategy = cache.get_task_result_path(task.metadata.name, model.mteb_model_meta), "only-missing"
    try:
        kept = cache.load_task_result(task.metadata.name, model.mteb_model_meta)
        # mteb itself would take a whole result of other data.
        if kept is not None and not kept.is_mergeable(task, ("dataset_revision", "mteb_version")):
            print("  its result is of other data or another mteb: the task is run again", flush=True)
            strategy = "always"
    except Exception as error:  # mteb writes in place, so a kill may leave half a file
        print(f"  {path}: not a whole result ({type(error).__name__}): the task is run again", flush=True)
        path.unlink()
    found = mteb.evaluate(model, task, cache=cache, overwrite_strategy=strategy, show_progress_bar=False)
    (result,) = found.task_results
    score = float(result.validate_and_filter_scores(task).get_score())
    if not math.isfinite(score):
        raise UserError(f"its score is {score}")
    return {
        "score": score,
        "metric": task.metadata.main_score,
        "dataset_revision": result.dataset_revision,
        "seconds": result.evaluation_time,
    }


def _root(args: MtebArgs) -> Path:
    if args.out is not None:
        return Path(args.out)
    if args.ckpt is None:
        return Path("eval/mteb")
    run = run_folder(args.ckpt, resolve(args.ckpt))
    if not is_local(run):
        raise UserError(f"ckpt={args.ckpt} is not on a disk: give out=FOLDER for the results")
    return run / "eval" / "mteb"


if __name__ == "__main__":
    cli(MtebArgs, evaluate, "python -m apps.embed.eval")
