"""What a step must not do: wait for the device, or compile again."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import ROOT, environment, run_app, tiny_words

APPS = ("bert", "crossbert")
# Operators whose result the host must know before it can go on: on a GPU each waits until all work is done.
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::is_nonzero")


def without_validation(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith(("data.validation.", "validation."))]


@pytest.mark.parametrize(("app", "changes"), [*((app, {}) for app in APPS), ("bert", {"objective": "rtd"})])
def test_no_operator_of_a_step_waits_for_its_result(corpus: Path, tmp_path: Path, app: str, changes: dict) -> None:
    quiet = {"steps": 6, "logging__every": 100, "profiling__steps": "[4]", "checkpoint__dump__every": 100}
    run_app(app, without_validation(tiny_words(app, corpus, tmp_path, **quiet, **changes)))
    (trace,) = (tmp_path / "profile").glob("*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    seen = [event for event in events if event.get("cat") == "cpu_op"]
    updates = [event for event in seen if event["name"] == "aten::_fused_adamw_"]
    assert len(updates) == 2  # one for each group: it was a whole step
    waits = Counter(
        event["name"]
        for event in seen
        # The CPU's kernel reads the number of the step; the GPU's does not.
        if event["name"] in WAITING and not any(u["ts"] <= event["ts"] <= u["ts"] + u["dur"] for u in updates)
    )
    # On a CPU alone, the loss looks whether its gradient is one.
    backward = sum(event["name"] == "_ChunkedCrossEntropyBackward" for event in seen)
    assert backward >= 2
    assert waits == {"aten::_local_scalar_dense": backward, "aten::is_nonzero": backward}


@pytest.mark.slow
@pytest.mark.parametrize(("app", "kinds"), [("bert", 1), ("crossbert", 2)])
def test_each_kind_of_block_is_compiled_once(corpus: Path, tmp_path: Path, app: str, kinds: int) -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    torch.compiler.reset()
    graphs.clear()
    # 9 rows by 4: the last micro-batch is padded.
    rows = {"bert": 9 * 32, "crossbert": 9 * 64}[app]
    changes = {"steps": 6, "batch_tokens": rows, "compile": "true", "stats__every": 3, "logging__every": 2}
    run_app(app, without_validation(tiny_words(app, corpus, tmp_path, **changes)))
    assert graphs["unique_graphs"] == kinds


def test_the_compiler_is_not_imported_at_the_start() -> None:
    """It takes a third of the time that an app takes to start."""
    code = "import sys, apps.bert.train, apps.crossbert.train; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)
