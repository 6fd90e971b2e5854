"""Laws from a table of runs: ``python -m apps.scaling.fit table=runs/sweep.csv out=runs/laws``.

Writes ``fits.json`` (``laws=`` of :mod:`apps.scaling.plan` reads it) and ``fits.md``. Of each family: learning rate and
batch of the best runs against the budget, the lowest loss and the best score against it, each with the largest budget
predicted from the others; and the best D/F ratio where a budget has runs of three sizes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from lingua import paper
from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.results import markdown_table, writable_folder, write_whole
from lingua.run_table import number, read_table, why_not
from lingua.scaling import fit_power_law, parabola

Row = dict[str, Any]
SAME = 1.1  # budgets within this factor of each other are one
NEEDED = 3  # budgets that a law needs


@dataclass
class FitArgs:
    """Fit laws to what apps.scaling.collect found."""

    table: str = "???"  # its table, CSV or parquet; or paper: the rows of Tables 10 and 11
    out: str = "???"  # folder for fits.json and fits.md
    loss: str | None = None  # column of the loss; none: valid/SET/loss@0.5 where there is one set
    score: str | None = None  # column of a score x 100, such as score/pos/ridge/honest; its distance to 100 is fitted
    # Best runs of a budget whose geometric mean of lr and batch is its point of the law; at most a third of its runs.
    top_k: int = 3
    margin: float = 0.3  # nats below a unigram model's loss that a run must have come to
    min_span: float = 0.5  # nats between the highest and the lowest loss, or there is no law to fit

    def __post_init__(self) -> None:
        if self.top_k < 1 or not self.margin >= 0 or not self.min_span >= 0:
            raise UserError(
                f"top_k={self.top_k}, margin={self.margin}, min_span={self.min_span}: expected 1 and 0 or more"
            )


def fit(args: FitArgs) -> dict[str, Any]:
    """Write and print all laws."""
    out = writable_folder(args.out)
    if args.table == "paper":
        found: dict[str, Any] = {
            "table": "paper",
            "loss": None,
            "score": None,
            "families": papers_laws(),
            "left_out": [],
        }
    else:
        rows = read_table(args.table)
        loss = args.loss or the_loss(rows)
        for name in filter(None, (loss, args.score)):
            if not any(name in row for row in rows):
                raise UserError(f"{args.table}: no column {name}; it has {', '.join(rows[0])}; {done_of(rows)}")
        used, left_out = choose(rows, loss, args.margin)
        families = sorted({row["family"] for row in used})
        found = {
            "table": args.table,
            "loss": loss,
            "score": args.score,
            "families": {
                family: family_laws([r for r in used if r["family"] == family], loss, args) for family in families
            },
            "left_out": left_out,
            "unscored": [row["run"] for row in used if args.score and number(row, args.score) is None],
            "unchecked": [row["run"] for row in used if unigram_of(row, loss) is None],
        }
    text = report(found)
    write_whole(out / "fits.md", text.encode())
    write_whole(out / "fits.json", (json.dumps(found, indent=1) + "\n").encode())
    print(f"{text}\nwritten to {out}/fits.json and {out}/fits.md")
    return found


def the_loss(rows: list[Row]) -> str:
    """The one validation set's loss at half of the tokens hidden. Raises UserError if that is not one column."""
    columns = [name for name in rows[0] if name.startswith("valid/") and name.endswith("/loss@0.5")]
    if len(columns) != 1:
        known = ", ".join(name for name in rows[0] if name.startswith("valid/")) or "none"
        raise UserError(f"give loss=COLUMN; the table's validation losses: {known}; {done_of(rows)}")
    return columns[0]


def done_of(rows: list[Row]) -> str:
    """How many runs are done: why a table may lack what it should have."""
    return f"{sum(row['state'] == 'done' for row in rows)} of its {len(rows)} runs are done"


def choose(rows: list[Row], loss: str, margin: float) -> tuple[list[Row], list[dict[str, str]]]:
    """Rows that enter laws, and the others with the reason of each."""
    used, left_out = [], []
    for row in rows:
        least, own = unigram_of(row, loss), number(row, loss)
        why = why_not(row, "budget", "ratio", "lr", "batch_tokens", "dim", "n_layers")
        if why is None and own is None:
            why = f"no finite {loss}"
        elif why is None and least is not None and own > least - margin:
            why = f"{loss} of {own:.3f} is not {margin:g} nat below a unigram model's {least:.3f}"
        if why is None:
            used.append(row)
        else:
            left_out.append({"run": row["run"], "why": why})
    return used, left_out


def unigram_of(row: Row, loss: str) -> float | None:
    """The loss of a model without context on the validation set of a column, if the table has it."""
    return number(row, f"unigram/{loss.split('/')[1]}") if loss.startswith("valid/") else None


def budgets_of(rows: list[Row]) -> dict[float, list[Row]]:
    """Rows by budget, ascending; a budget is the geometric mean of planned FLOPs that are nearly the same."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row["budget"]):
        if groups and row["budget"] <= groups[-1][0]["budget"] * SAME:
            groups[-1].append(row)
        else:
            groups.append([row])
    return {_mean([row["budget"] for row in group]): group for group in groups}


def family_laws(rows: list[Row], loss: str, args: FitArgs) -> dict[str, Any]:
    """All laws of one family."""
    budgets = budgets_of(rows)
    best = {budget: sorted(group, key=lambda row: row[loss]) for budget, group in budgets.items()}
    laws: dict[str, Any] = {}
    for name in ("lr", "batch_tokens"):
        searched = {b: group for b, group in best.items() if len({row[name] for row in group}) > 1}
        top = {budget: group[: min(args.top_k, math.ceil(len(group) / 3))] for budget, group in searched.items()}
        laws[name] = law_of({budget: _mean([row[name] for row in group]) for budget, group in top.items()})
        if not searched:
            laws[name] = {"none": "every budget has one value of it only, so nothing was found out"}
    losses = {budget: group[0][loss] for budget, group in best.items()}
    span = max(losses.values()) - min(losses.values())
    if span < args.min_span:
        laws["loss"] = {"none": f"losses span {span:.3f} nat, less than {args.min_span:g}: there is no law to fit"}
    else:
        laws["loss"] = law_of(losses)
    if args.score is not None:
        known = {b: [s for row in group if (s := number(row, args.score)) is not None] for b, group in budgets.items()}
        laws["100 - score"] = law_of({budget: 100 - max(scores) for budget, scores in known.items() if scores})
    return {"runs": len(rows), "laws": laws, "isoflop": isoflop(budgets, loss), "sizes": uneven_sizes(budgets)}


def size_of(row: Row) -> tuple[Any, ...]:
    """Of a model: runs of one budget with several sizes are points of a parabola."""
    return row["dim"], row["n_layers"], row.get("pred_layers")


def uneven_sizes(budgets: dict[float, list[Row]]) -> dict[str, int] | None:
    """Sizes of each budget, if some have several and others one: a law through the best of each is then bent."""
    sizes = {f"{budget:.3g}": len({size_of(row) for row in group}) for budget, group in budgets.items()}
    return sizes if min(sizes.values()) == 1 < max(sizes.values()) else None


def law_of(points: dict[float, float]) -> dict[str, Any]:
    """A law through ``{budget: value}``, and the largest budget predicted from the others."""
    listed = [{"flops": budget, "value": value} for budget, value in points.items()]
    if len(points) < NEEDED:
        return {"none": f"{len(points)} budgets, and a law needs {NEEDED}", "points": listed}
    x, y = list(points), list(points.values())
    if min(y) <= 0:
        return {"none": "a value is not above 0", "points": listed}
    found = asdict(fit_power_law(x, y))
    prediction = fit_power_law(x[:-1], y[:-1]).law(x[-1])
    found["largest"] = {
        "flops": x[-1],
        "predicted": prediction,
        "found": y[-1],
        "error": prediction / y[-1] - 1,
    }
    return {**found, "number": found.pop("points"), "points": listed}


def isoflop(budgets: dict[float, list[Row]], loss: str) -> dict[str, Any]:
    """A parabola of loss over log D/F for each budget with several sizes, and the best ratio over all of them."""
    parabolas = []
    for budget, group in budgets.items():
        sizes = {size_of(row) for row in group}
        if len(sizes) < 2:
            continue
        of_size = [min((r for r in group if size_of(r) == size), key=lambda r: r[loss]) for size in sizes]
        of_size.sort(key=lambda row: row["ratio"])
        points = [{"ratio": row["ratio"], "loss": row[loss], "run": row["run"]} for row in of_size]
        curve = parabola([row["ratio"] for row in of_size], [row[loss] for row in of_size])
        known = curve._asdict() | {"coefficients": curve.coefficients and list(curve.coefficients)}
        parabolas.append({"flops": budget, "points": points, **known})
    best = [found["best"] for found in parabolas if found["best"] is not None]
    return {"budgets": parabolas, "best_ratio": _mean(best) if best else None}


def papers_laws() -> dict[str, Any]:
    """Laws through the models of Tables 10 and 11: batch over all ids, LR over those that follow the law."""
    families = {}
    for family in paper.FAMILIES:
        rows = paper.suite(family)
        lawful = [row for row in rows if family == "bert" or row["id"] <= 6]
        laws = {
            "lr": law_of({row["flops"]: row["lr"] for row in lawful}),
            "batch_tokens": law_of({row["flops"]: row["batch_tokens"] for row in rows}),
        }
        families[family] = {"runs": len(rows), "laws": laws, "isoflop": {"budgets": [], "best_ratio": None}}
    return families


def report(found: dict[str, Any]) -> str:
    """All of it as Markdown."""
    text = [f"# Laws of {found['table']}\n"]
    if found["loss"]:
        text.append(f"Loss: `{found['loss']}`, in nats. Budgets C in training FLOPs, as the paper counts them.\n")
    rows, reasons = [], []
    for family, known in found["families"].items():
        for name, law in known["laws"].items():
            if "none" in law:
                reasons.append(f"- {family}, {name}: no law. {law['none'][0].upper()}{law['none'][1:]}.\n")
                continue
            low, high = law["low"], law["high"]
            between = "too few points" if low is None else f"{low:.3f} to {high:.3f}"
            last = law["largest"]
            numbers = [f"{law['law']['constant']:.4g}", f"{law['law']['exponent']:.4f}", between]
            ending = [f"{last['predicted']:.4g}", f"{last['found']:.4g}", f"{last['error']:+.1%}"]
            rows.append([f"{family}, {name}", str(law["number"]), *numbers, f"{law['spread']:.1%}", *ending])
    if rows:
        header = ["value = a C^b", "budgets", "a", "b", "95% of b", "farthest", "largest C predicted", "found", "error"]
        text.append(markdown_table(header, rows))
    if reasons:
        text.append("".join(reasons))
    for family, known in found["families"].items():
        if sizes := known.get("sizes"):
            each = ", ".join(f"{count} at {budget}" for budget, count in sizes.items())
            text.append(
                f"{family}: sizes were searched at some budgets only ({each}), so the laws above compare the best of "
                "several with the only one: collect and fit the runs of one D/F apart.\n"
            )
    text += [isoflop_table(family, known["isoflop"]) for family, known in found["families"].items()]
    if found["left_out"]:
        text.append("Left out:\n\n" + "".join(f"- {run['run']}: {run['why']}\n" for run in found["left_out"]))
    if unscored := found.get("unscored"):
        text.append(
            f"Without `{found['score']}`, so not in a law of it:\n\n" + "".join(f"- {run}\n" for run in unscored)
        )
    if unchecked := found.get("unchecked"):
        text.append(
            f"Of {len(unchecked)} of the runs that entered it is not known whether they ever left a unigram model's "
            "loss: their rows have none (`unigram=true` of python -m apps.scaling.collect, with their shards there).\n"
        )
    if not found["families"]:
        text.append("No run is left that could enter a law.\n")
    return "\n".join(filter(None, text))


def isoflop_table(family: str, known: dict[str, Any]) -> str:
    """Budgets with runs of several sizes."""
    if not known["budgets"]:
        return ""
    rows = []
    for curve in known["budgets"]:
        points = ", ".join(f"{p['ratio']:.3g}: {p['loss']:.3f}" for p in curve["points"])
        best = curve["why"] if curve["best"] is None else f"{curve['best']:.3g}"
        rows.append([f"{curve['flops']:.3g}", points, best])
    overall = "none" if known["best_ratio"] is None else f"{known['best_ratio']:.3g}"
    return f"{family}: loss by D/F at the same FLOPs. Best ratio over budgets: {overall}.\n\n" + markdown_table(
        ["C", "D/F: loss", "best D/F"], rows
    )


def _mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    cli(FitArgs, fit, "python -m apps.scaling.fit")
