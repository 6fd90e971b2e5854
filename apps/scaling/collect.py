"""Run folders to one table, a row a run, whatever came of it.

python -m apps.scaling.collect runs=[runs/sweep] out=runs/sweep.csv
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingua.args import build, cli, read_yaml
from lingua.errors import UserError
from lingua.evaluation.results import score_of
from lingua.run_folder import Summary, summarize, unigram_losses
from lingua.run_table import write_table
from lingua.stool import records, sweep
from lingua.stool.plan import accepted, load_script, meta_model

FAMILIES = {"mlm": "bert", "rtd": "electra", "clm": "clm"}  # of apps.bert.train, by objective
SCORES = ("paper", "honest")


@dataclass
class CollectArgs:
    """Collect what runs were and what came of them."""

    runs: list[str] = field(default_factory=list)  # run folders, sweeps, or folders of these
    out: str = "???"  # FILE.csv or FILE.parquet
    unigram: bool = True  # compute the loss of a unigram model on each validation set; needs the shards

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no runs: give runs=[runs/a,runs/b]")
        if not self.out.endswith((".csv", ".parquet")):
            raise UserError(f"out={self.out}: expected a file that ends in .csv or .parquet")


def collect(args: CollectArgs) -> list[dict[str, Any]]:
    """Write the table; print a line for each run that is not done."""
    folders = [folder for path in args.runs for folder in find(Path(path))]
    if len(set(folders)) < len(folders):
        twice = {str(folder) for folder in folders if folders.count(folder) > 1}
        raise UserError(f"runs={args.runs}: a run comes twice: {', '.join(sorted(twice))}")
    known: dict[str, dict[str, float]] = {}  # unigram losses by validation sets
    rows = [row_of(folder, args.unigram, known) for folder in folders]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    rows = [{column: row.get(column) for column in columns} for row in rows]
    write_table(rows, columns, args.out)
    for row in rows:
        if row["state"] != "done" or row["note"]:
            print(f"{row['run']}: {row['state']}. {row['note']}".rstrip(". "))
    done = sum(row["state"] == "done" for row in rows)
    print(f"{len(rows)} runs, {done} of them done, written to {args.out}")
    return rows


def find(path: Path) -> list[Path]:
    """Run folders at or in a path: a sweep's, in its order, also those that are missing; or the path itself."""
    if (path / sweep.INDEX).is_file():
        return [path / line["name"] for line in sweep.runs(path)]
    if _is_run(path) or not path.is_dir():
        return [path]
    inside = [run for child in sorted(path.iterdir()) if child.is_dir() for run in find(child)]
    return [run for run in inside if run.is_dir() and _is_run(run)] or [path]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()


def row_of(folder: Path, unigram: bool, known: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One run: its state, what it is, and its newest figures; of a damaged file only that it is damaged."""
    try:
        run = summarize(folder, str(folder))
    except UserError as error:
        return {"run": str(folder), "state": f"damaged: {error}", "note": ""}
    row: dict[str, Any] = {"run": str(folder), "state": state_of(folder, run), "note": ""}
    notes = []
    if (folder / "config.yaml").is_file():
        try:
            config = read_yaml(folder / "config.yaml")
            row |= about(config, folder)
            if unigram:
                row |= {f"unigram/{name}": value for name, value in _unigrams(config, known).items()}
        except UserError as error:
            notes.append(str(error))
    if skipped := run.last("skipped_steps"):
        notes.append(f"{skipped:,} steps were not finite and changed nothing")
    row |= {"step": run.last("step"), "tokens": run.last("tokens"), "data_tokens": run.last("data_tokens")}
    row |= {"flops": run.last("flops"), "loss": run.last("loss")}
    row |= {
        key: run.last(key) for key in sorted({k for record in run.records for k in record if k.startswith("valid/")})
    }
    row |= scores(run)
    row["note"] = "; ".join(notes)
    return row


def state_of(folder: Path, run: Summary) -> str:
    """done; what stopped it, by its launcher's records; or how far it came."""
    told = records.summary(folder)
    if run.state != "done" and told["state"] in records.ENDED and told["state"] != records.FINISHED:
        reason = f": {told['reason']}" if told.get("reason") else ""
        return f"{told['state'].lower()}{reason} ({run.state})"
    return run.state


def about(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run is, from its config: family, shape, hyper-parameters, parameters, FLOPs. Raises UserError."""
    app = "crossbert" if "predictor" in config.get("model", {}) else "bert"
    family = app if app == "crossbert" else FAMILIES.get(config.get("objective", "mlm"), "unknown")
    script = load_script(f"apps.{app}.train")
    built = build(script.config_class, (f"{folder}/config.yaml", config))
    model = meta_model(script.module, built)
    flops_per_token = model.flops_per_token(**accepted(model.flops_per_token, built))
    tokens = built.tokens or (
        built.flops / flops_per_token if built.steps is None else built.steps * built.batch_tokens
    )
    steps = built.steps or max(1, round(tokens / built.batch_tokens))
    predictor = getattr(built.model, "predictor", None)
    return {
        "family": "stages" if config.get("stages") else family,
        "seed": built.seed,
        "dim": built.model.dim,
        "n_layers": built.model.n_layers,
        "n_heads": built.model.n_heads,
        "pred_layers": None if predictor is None else predictor.n_layers,
        "hidden_ratio": built.masking.hidden_ratio,
        "lr": built.optim.lr,
        "batch_tokens": built.batch_tokens,
        "steps": steps,
        "flops_per_token": flops_per_token,
        "budget": steps * built.batch_tokens * flops_per_token,
        "ratio": steps * built.batch_tokens / flops_per_token,
        **{f"params_{name}": count for name, count in model.parameter_counts().items()},
    }


def scores(run: Summary) -> dict[str, float]:
    """Scores x 100 of the newest evaluation's last layer: ``score/TASK/PROBE/paper`` and ``honest``."""
    if run.results is None:
        return {}
    found = {}
    for name, task in run.results["tasks"].items():
        layer = max(task["layers"], key=int)
        for kind in task["layers"][layer]:
            found |= {f"score/{name}/{kind}/{s}": score_of(run.results, name, layer, kind, s) for s in SCORES}
    return found


def _unigrams(config: dict[str, Any], known: dict[str, dict[str, float]]) -> dict[str, float]:
    key = str((config["data"].get("validation"), config["data"]["tokenizer"], config["data"]["seq_len"]))
    if key not in known:
        known[key] = unigram_losses(config)
    return known[key]


if __name__ == "__main__":
    cli(CollectArgs, collect, "python -m apps.scaling.collect")
