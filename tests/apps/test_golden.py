"""Golden files: a tiny run of each app on made-up text, from raw text to the losses, compared with a recorded one.

What is computed in integers (tokens, rows, masks) must be equal. What is computed in floats may differ by rounding,
since other processors have other vector widths and libraries sum in another order.

``python -m tests.apps.test_golden`` rewrites the files, for a change that is meant to change them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from apps.bert.model import Bert
from apps.crossbert.model import CrossBert
from lingua.loss import LossSum
from lingua.manifest import load_manifest
from lingua.masking import View
from lingua.metrics import read_metrics
from tests.support import ROOT, made_up_documents, prepare, run_app, tiny_words

MODELS = {"bert": Bert, "crossbert": CrossBert}
RELATIVE = 1e-5
STEPS_SEEN = 3  # whose inputs and masks are recorded
INIT_STD = 0.1  # with the default, attention of so narrow a model is flat at first, and a wrong position goes unseen


def golden_path(app: str) -> Path:
    return ROOT / f"tests/golden/{app}.json"


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def measure(app: str, folder: Path) -> dict[str, Any]:
    """Prepare the text, train, and return what the golden file holds: ``exact`` and ``close`` values."""
    data = prepare(folder, made_up_documents(300))
    seen: list[tuple[Tensor, View]] = []  # what the model was given
    model = MODELS[app]
    real_forward = model.forward

    def forward(self: torch.nn.Module, *args: Any) -> LossSum:
        if self.training:
            seen.append((args[0], next(arg for arg in args if isinstance(arg, View))))
        return real_forward(self, *args)

    with mock.patch.object(model, "forward", forward):
        run_app(app, tiny_words(app, data, folder / app, model__init_std=INIT_STD))

    records = read_metrics(folder / app / "metrics.jsonl")
    names = ["loss", "grad_norm", "lr", *(f"valid/made_up/loss@{ratio}" for ratio in (0.15, 0.3, 0.5))]
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


@pytest.mark.parametrize("app", MODELS)
def test_a_tiny_run_is_as_it_was_recorded(app: str, tmp_path: Path) -> None:
    path = golden_path(app)
    wrong = differences(measure(app, tmp_path), json.loads(path.read_text()))
    assert not wrong, (
        f"{len(wrong)} values differ from {path.relative_to(ROOT)}:\n" + "\n".join(wrong[:10]) + "\n"
        "If the change is meant, rewrite the files with `python -m tests.apps.test_golden` and say why in the commit."
    )


@pytest.mark.parametrize("app", MODELS)
def test_a_difference_is_found(app: str) -> None:
    golden = json.loads(golden_path(app).read_text())
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
    """Record both files anew."""
    torch.set_num_threads(1)
    for app in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            golden = measure(app, Path(folder))
        golden_path(app).parent.mkdir(exist_ok=True)
        golden_path(app).write_text(json.dumps(golden, indent=1) + "\n")
        print(f"rewritten: {golden_path(app)}")


if __name__ == "__main__":
    rewrite()
