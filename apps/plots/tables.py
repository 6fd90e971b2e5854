"""Tables 1 to 11, the paper's values beside ours: ``python -m apps.plots.tables config=mine.yaml out=runs/tables``.

```yaml
# mine.yaml: which of our runs stands for which of the paper's models; all sections are optional
probes: {BERT-239M: runs/bert, CrossBERT-279M: runs/crossbert, CrossBERT-279M mask20: runs/cross20}
finetuned: {BERT-239M: runs/bert_glue}   # folders of apps.finetune.report
frozen: {BERT-239M: runs/bert_pooler}    # of apps.embed.eval, with their evaluations inside
unfrozen: {BERT-239M: runs/bert_embed}
```

A cell is ``paper / ours``. Ours is ``-`` where no run gives a value, or a mean over fewer tasks than the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingua import paper
from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.results import RESULTS, UNTRAINED, markdown_table, writable_folder, write_whole
from lingua.run_folder import read_results
from lingua.run_table import read_table, why_not

NONE = "-"
NEEDED = ("params_per_token", "budget", "dim", "n_layers", "n_heads", "steps", "batch_tokens", "lr")  # of a suite's row
TITLES = {
    1: "GLUE, linear probe, by layer: means of eight tasks",
    2: "CrossBERT by mask ratio, without complementary masks: means of GLUE's eight tasks",
    3: "Models of one scale: GLUE and MTEB",
    4: "CrossBERT by predictor",
    5: "CrossBERT without and with complementary masks",
    6: "BERT by mask ratio",
    7: "Poolers on a frozen CrossBERT",
    8: "MTEB(eng, v2)",
    9: "GLUE, linear probe, larger models",
    10: "The suite of BERT",
    11: "The suite of CrossBERT",
}


@dataclass
class TablesArgs:
    """Write the paper's tables with our runs beside. Keys of the sections are the paper's model names."""

    out: str = "???"  # folder for tables.md
    tables: list[int] = field(default_factory=lambda: list(TITLES))
    score: str = "paper"  # of a probe: paper (as the paper takes it) or honest
    probe: str = "ridge"  # the linear probe; knn and attentive are others
    probes: dict[str, str] = field(default_factory=dict)  # run folder, or an evaluation's results.json in it
    finetuned: dict[str, str] = field(default_factory=dict)  # folder of apps.finetune.report: full fine-tuning on GLUE
    frozen: dict[str, str] = field(default_factory=dict)  # folder with results of apps.embed.eval: MTEB, encoder frozen
    unfrozen: dict[str, str] = field(default_factory=dict)  # the same, everything trained
    table: str | None = None  # of apps.scaling.collect: runs that stand under the suites

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tables) - set(TITLES))
        if unknown:
            raise UserError(f"tables={unknown}: expected numbers from 1 to 11")
        if self.score not in ("paper", "honest"):
            raise UserError(f"score={self.score}: expected paper or honest")
        known = {"probes": models(1, 2, 4, 5, 6, 9) | models(3, setting="linear_probe") | ratios()}
        known["finetuned"] = models(3, setting="full")
        known |= {name: models(3, 7, 8, setting=name) for name in ("frozen", "unfrozen")}
        for section, names in known.items():
            for name in getattr(self, section):
                if name not in names:
                    raise UserError(f"{section}: {name} is none of the paper's models: {', '.join(sorted(names))}")


def models(*tables: int, setting: str | None = None) -> set[str]:
    """Names of the paper's models."""
    return {r.model for r in paper.results() if r.table in tables and (setting is None or r.setting == setting)}


def ratios() -> set[str]:
    """Table 2's columns are runs of their own."""
    return {f"{r.model} {r.column}" for r in paper.results() if r.table == 2}


def tables(args: TablesArgs) -> str:
    """Write ``tables.md`` and return it."""
    out = writable_folder(args.out)
    ours = Ours(args)
    text = [
        "# The paper's tables, and ours\n\n"
        "A cell is `paper / ours`; `-` where there is no value. Scores x 100; ours of probes are "
        f"{args.probe}, score `{args.score}`.\n"
    ]
    for number in args.tables:
        text.append(f"## Table {number}: {TITLES[number]}\n")
        text.append(suite_table(number, args.table) if number >= 10 else results_tables(number, ours))
    if args.table is not None and {10, 11} & set(args.tables):
        left_out = [f"- {row['run']}: {why}\n" for row in read_table(args.table) if (why := why_not(row, *NEEDED))]
        if left_out:
            text.append("Runs that are not in Tables 10 and 11:\n\n" + "".join(left_out))
    text.append("## Where the paper's numbers contradict each other\n")
    text.append("".join(f"- {place}: {what}.\n" for place, what in paper.ERRATA.items()))
    whole = "\n".join(text)
    write_whole(out / "tables.md", whole.encode())
    print(f"{whole}\nwritten to {out}/tables.md")
    return whole


def results_tables(number: int, ours: Ours) -> str:
    """One Markdown table for each benchmark and setting of a table of the paper."""
    parts: dict[tuple[str, str], list[paper.Result]] = {}
    for found in paper.results():
        if found.table == number:
            parts.setdefault((found.benchmark, found.setting), []).append(found)
    text = []
    for (benchmark, setting), found in parts.items():
        columns = list(dict.fromkeys(result.column for result in found))
        rows: dict[str, dict[str, paper.Result]] = {}
        for result in found:
            rows.setdefault(result.model, {})[result.column] = result
        lines = []
        for model, row in rows.items():
            cells = [f"{row[c].value:.1f}" if c in row else NONE for c in columns]
            own = [ours.value(number, benchmark, setting, model, c) for c in columns]
            pairs = [f"{a} / {NONE if b is None else f'{b:.1f}'}" for a, b in zip(cells, own, strict=True)]
            lines.append([model, *pairs])
        text.append(f"{benchmark}, {setting.replace('_', ' ')}\n\n{markdown_table(['model', *columns], lines)}")
    return "\n".join(text)


def suite_table(number: int, table: str | None) -> str:
    """A suite as printed, and under it our finished runs of that family."""
    family = paper.FAMILIES[number - 10]
    rows = paper.suite(family)
    columns = list(rows[0])
    lines = [[f"paper {row['id']}", *(str(row[column]) for column in columns[1:])] for row in rows]
    own = runs_of(family, table)
    lines += [[f"ours {row['run']}", *(row.get(column, NONE) for column in columns[1:])] for row in own]
    if len(lines) == len(rows):
        lines.append(["ours", *(NONE for _ in columns[1:])])
    return markdown_table(["", *columns[1:]], lines)


def runs_of(family: str, table: str | None) -> list[dict[str, str]]:
    """Finished runs of a table of apps.scaling.collect, named as in the paper's columns."""
    if table is None:
        return []
    wide = {"bert": "", "crossbert": "enc_"}[family]
    found = []
    for row in read_table(table):
        if why_not(row, *NEEDED) or row["family"] != family:
            continue
        own = {
            "run": Path(row["run"]).name,
            "params_m": f"{row['params_per_token'] / 1e6:.4g}",
            "flops": f"{row['budget']:.3g}",
            f"{wide}dim": str(row["dim"]),
            "n_layers" if family == "bert" else "enc_layers": str(row["n_layers"]),
            "n_heads" if family == "bert" else "enc_heads": str(row["n_heads"]),
            f"{wide}head_dim": str(row["dim"] // row["n_heads"]),
            "steps": str(row["steps"]),
            "tokens_b": f"{row['steps'] * row['batch_tokens'] / 1e9:.3g}",
            "batch_tokens": str(row["batch_tokens"]),
            "lr": f"{row['lr']:g}",
        }
        if family == "crossbert":
            own |= {"pred_layers": str(row["pred_layers"])}
        found.append(own)
    return found


class Ours:
    """Our values by the paper's names; files are read once."""

    def __init__(self, args: TablesArgs) -> None:
        self.args = args
        self._read: dict[str, Any] = {}

    def value(self, table: int, benchmark: str, setting: str, model: str, column: str) -> float | None:
        """Score x 100, or None."""
        if benchmark in paper.MTEB_TASKS:
            folder = getattr(self.args, setting).get(model)
            return None if folder is None else self._mteb(folder, benchmark, column)
        if setting == "full":
            folder = self.args.finetuned.get(model)
            return None if folder is None else self._finetuned(folder, column)
        folder = self.args.probes.get(f"{model} {column}" if table == 2 else model)
        if folder is None:
            return None
        return self._probed(folder, "last" if table == 2 else column, by_layer=table in (1, 2))

    def _once(self, path: str, read: Callable[[Path], Any]) -> Any:
        if path not in self._read:
            self._read[path] = read(Path(path))
        return self._read[path]

    def _probed(self, folder: str, column: str, by_layer: bool) -> float | None:
        """A GLUE task at the last layer, their mean there, or their mean at a layer named as in Table 1."""
        results = self._once(folder, newest_results)
        kind, score = self.args.probe, self.args.score
        last = max(map(int, results["layers"]))
        layer = last
        if by_layer:
            layer = int(column.removeprefix("layer")) if column.startswith("layer") else last + int(column[4:] or 0)
        if by_layer or column == "Avg":
            at = (results.get("glue_average") or {}).get(str(layer), {})
            return 100 * at[kind][score] if kind in at else None
        task = results["tasks"].get(column.lower())
        at = {} if task is None else task["layers"].get(str(layer), {})
        return 100 * at[kind][score][task["metric"]] if kind in at else None  # type: ignore[index]

    def _finetuned(self, folder: str, column: str) -> float | None:
        """The mean over seeds of a GLUE task's primary metric, or of the eight tasks."""
        found = self._once(folder, lambda path: read_json(path / RESULTS, "rows", "python -m apps.finetune.report"))
        if column == "Avg":
            means = [mean["mean"] for mean in found["glue_means"] if mean.get("mean") is not None]
            return 100 * means[-1] if means else None
        rows = [row for row in found["rows"] if row["task"] == column.lower()]
        rows.sort(key=lambda row: row["init"] is not None)  # one that began from MNLI's weights, if there is one
        return 100 * rows[-1]["all_seeds"][rows[-1]["metric"]]["mean"] if rows else None

    def _mteb(self, folder: str, benchmark: str, column: str) -> float | None:
        """A type's mean or one of the two averages, if every task is in it."""
        found = self._once(folder, mteb_results).get(benchmark)
        if found is None:
            return None
        name = {"MeanTaskType": "mean_task_type", "MeanTask": "mean_task"}.get(column)
        if name is not None:
            return None if found[name] is None else 100 * found[name]
        of_type = found["by_type"].get(column)
        complete = of_type is not None and of_type["tasks"] == of_type["of"]
        return 100 * of_type["score"] if complete else None


def newest_results(path: Path) -> dict[str, Any]:
    """Of a run folder its newest evaluation; of a results.json that one. Raises UserError if there is none."""
    if path.is_file():
        return read_results(path)
    found = [read_results(p) for p in sorted((path / "eval").glob(f"*/{RESULTS}")) if p.parent.name != UNTRAINED]
    if not found:
        raise UserError(f"{path}: no evaluation in it; python -m apps.APP.eval ckpt={path} tasks=glue makes one")
    return max(found, key=lambda results: results["step"] or 0)


def mteb_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results of apps.embed.eval at or under a folder, by benchmark. Raises UserError if there are none."""
    files = [path] if path.is_file() else sorted(path.rglob(RESULTS))
    found = [json.loads(file.read_text()) for file in files]
    by_benchmark = {r["benchmark"]: r for r in found if isinstance(r, dict) and "benchmark" in r and "by_type" in r}
    if not by_benchmark:
        raise UserError(f"{path}: no results of python -m apps.embed.eval in it")
    return by_benchmark


def read_json(path: Path, key: str, command: str) -> dict[str, Any]:
    """A file that a command wrote. Raises UserError if it is missing or another one's."""
    try:
        found = json.loads(path.read_text())
        found[key]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not there, or not written by {command}") from None
    return found


if __name__ == "__main__":
    cli(TablesArgs, tables, "python -m apps.plots.tables")
