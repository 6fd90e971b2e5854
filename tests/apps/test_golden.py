"""Golden files: a tiny run of each app and objective on made-up text, from raw text to the losses, as recorded once.

What is computed in integers (tokens, rows, masks) must be equal. What is computed in floats may differ by rounding,
since other processors have other vector widths and libraries sum in another order.

``python -m tests.apps.test_golden [NAME ...]`` rewrites the files, for a change that is meant to change them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from apps.bert.electra import Electra
from apps.bert.model import Bert
from apps.crossbert.model import CrossBert
from lingua.loss import LossSum
from lingua.manifest import load_manifest
from lingua.masking import View
from lingua.metrics import read_metrics
from tests.support import ROOT, made_up_documents, prepare, run_app, tiny_words

MODELS = (Bert, Electra, CrossBert)
RUNS = {  # by golden file: the app and what its config says
    "bert": ("bert", {}),
    "crossbert": ("crossbert", {}),
    # In fp64, where rounding moves no sample to another token.
    "rtd": ("bert", {"objective": "rtd", "dtype": "fp64"}),
    "clm": ("bert", {"objective": "clm"}),
    "clm_mlm": (
        "bert",
        {"stages__a__objective": "clm", "stages__a__fraction": 0.25, "stages__b__objective": "mlm"},
    ),
}
RELATIVE = 1e-5
STEPS_SEEN = 3  # whose inputs and masks are recorded
INIT_STD = 0.1  # with the default, attention of so narrow a model is flat at first, and a wrong position goes unseen


def golden_path(name: str) -> Path:
    return ROOT / f"tests/golden/{name}.json"


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Prepare the text, train, and return what the golden file holds: ``exact`` and ``close`` values."""
    app, options = RUNS[name]
    data = prepare(folder, made_up_documents(300))
    seen: list[tuple[Tensor, View]] = []  # what the model was given
    nothing = torch.zeros(1, 0, dtype=torch.int64)

    def watched(real_forward: Callable) -> Callable:
        def forward(self: torch.nn.Module, *args: Any) -> LossSum:
            if self.training:
                view = next((arg for arg in args if isinstance(arg, View)), View(nothing, nothing))  # of clm: no mask
                seen.append((args[0], view))
            return real_forward(self, *args)

        return forward

    with ExitStack() as stack:
        for model in MODELS:
            stack.enter_context(mock.patch.object(model, "forward", watched(model.forward)))
        run_app(app, tiny_words(app, data, folder / name, model__init_std=INIT_STD, **options))

    records = read_metrics(folder / name / "metrics.jsonl")
    found = sorted({key for record in records for key in record if key.startswith("valid/") or key.endswith("_loss")})
    names = ["loss", "grad_norm", "lr", *found]
    seen_a_step = len(seen) // len([record for record in records if "loss" in record])
    first = seen[: STEPS_SEEN * seen_a_step]
    return {
        "exact": {
            "shards": {split: _shard_hashes(data / "made_up" / split) for split in ("train", "valid")},
            "first_row_seen": seen[0][0][0].tolist(),
            "first_row_hidden": seen[0][1].hidden_BM[0].tolist(),
            "inputs": [sha256(inputs) for inputs, _ in first],
            "hidden": [sha256(view.hidden_BM) for _, view in first],
            "visible": [sha256(view.visible_BT) for _, view in first],
        },
        "close": {name: [record[name] for record in records if name in record] for name in names},
    }


def _shard_hashes(folder: Path) -> list[str]:
    return [shard.tokens_sha256 for shard in load_manifest(folder).shards]


def differences(found: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """A line for each value that differs; empty if none does."""
    lines = [
        f"{name}: found {found['exact'].get(name)}, recorded {value}"
        for name, value in golden["exact"].items()
        if found["exact"].get(name) != value
    ]
    for name, values in golden["close"].items():
        others = found["close"].get(name, [])
        if len(others) != len(values):
            lines.append(f"{name}: found {len(others)} values, recorded {len(values)}")
        for i, (other, value) in enumerate(zip(others, values, strict=False)):
            if other != pytest.approx(value, rel=RELATIVE, abs=0):
                lines.append(f"{name}, value {i}: found {other!r}, recorded {value!r}")
    return lines


@pytest.mark.parametrize("name", RUNS)
def test_a_tiny_run_is_as_it_was_recorded(name: str, tmp_path: Path) -> None:
    path = golden_path(name)
    wrong = differences(measure(name, tmp_path), json.loads(path.read_text()))
    assert not wrong, (
        f"{len(wrong)} values differ from {path.relative_to(ROOT)}:\n" + "\n".join(wrong[:10]) + "\n"
        "If the change is meant, rewrite the files with `python -m tests.apps.test_golden` and say why in the commit."
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_difference_is_found(run: str) -> None:
    golden = json.loads(golden_path(run).read_text())
    assert differences(golden, golden) == []
    assert len(golden["close"]["loss"]) == 30
    for name, values in golden["close"].items():
        for changed in (values[-1] * (1 + 3 * RELATIVE), float("nan")):
            other = copy.deepcopy(golden)
            other["close"][name][-1] = changed
            assert [line.split(",")[0] for line in differences(other, golden)] == [name]
        other["close"][name] = values[:-1]
        assert differences(other, golden) == [f"{name}: found {len(values) - 1} values, recorded {len(values)}"]
    for name in golden["exact"]:
        other = copy.deepcopy(golden)
        del other["exact"][name]
        assert [line.split(":")[0] for line in differences(other, golden)] == [name]


def rewrite() -> None:
    """Record the files anew: all, or those named on the command line."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            golden = measure(name, Path(folder))
        golden_path(name).parent.mkdir(exist_ok=True)
        golden_path(name).write_text(json.dumps(golden, indent=1) + "\n")
        print(f"rewritten: {golden_path(name)}")


if __name__ == "__main__":
    rewrite()
