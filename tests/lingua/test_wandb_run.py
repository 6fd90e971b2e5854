from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lingua.errors import UserError
from lingua.wandb_run import WandbArgs, WandbRun

wandb = pytest.importorskip("wandb")
CONFIG = {"seed": 3, "optim": {"lr": 0.1}, "data": {"sources": {"web": 1.0}}}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account of this machine's user, and nothing written outside the test's folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    wandb.teardown()  # it reads the environment once a process
    yield
    wandb.teardown()


def stored(path: Path) -> list[Any]:
    """The records of an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, records = DataStore(), []
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        records.append(Record())
        records[-1].ParseFromString(data)
    return records


def history(records: list[Any]) -> list[dict[str, float]]:
    found = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            found.append({key: value for key, value in items.items() if not key.startswith(("_r", "_t", "_w"))})
    return found


def one_start(folder: Path, steps: range, mode: str | None = "offline") -> None:
    """A process of the run: what Run does with W&B, offline."""
    run = WandbRun(WandbArgs(project="ours", mode=mode), folder, CONFIG)
    for step in steps:
        run.write({"step": step, "loss": 1.0 / step})
        run.write({"step": step, "valid/web/loss@0.5": 2.0})
    run.close()
    wandb.teardown()  # as the process ends; its helper writes the file to its end


def test_offline_a_requeued_run_keeps_its_id_and_all_metrics_are_stored(tmp_path: Path) -> None:
    folder = tmp_path / "my_run"
    folder.mkdir()
    one_start(folder, range(1, 4))
    time.sleep(1.1)  # its folders are named by the second
    one_start(folder, range(4, 6))
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    run_id = (folder / "wandb_id").read_text().strip()
    runs = [r.run for file in files for r in stored(file) if r.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(run_id, "ours", "my_run")}
    config = {item.key: json.loads(item.value_json) for item in runs[-1].config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    rows = [row for file in files for row in history(stored(file))]
    assert rows == [{"_step": step, "loss": 1.0 / step, "valid/web/loss@0.5": 2.0} for step in range(1, 6)]


def test_online_it_resumes_by_its_id_and_sends_no_step_twice(tmp_path: Path) -> None:
    calls, sent = [], []

    def init(**words: Any) -> mock.Mock:
        calls.append(words)
        run = mock.Mock()
        run.step = 0 if len(calls) == 1 else 8  # as the server tells it: killed after step 7
        run.log.side_effect = lambda values, step: sent.append((step, values))
        return run

    args = WandbArgs(project="ours", entity="team", group="g", tags=["a"], mode="online")
    with mock.patch("wandb.init", init), mock.patch("requests.head"):
        first = WandbRun(args, tmp_path, CONFIG)
        first.write({"step": 7, "loss": 1.0})
        again = WandbRun(args, tmp_path, CONFIG)
        for step in (6, 7, 8):
            again.write({"step": step, "loss": 0.5})
    assert sent == [(7, {"loss": 1.0}), (8, {"loss": 0.5})]
    assert [call["resume"] for call in calls] == ["allow", "allow"]
    assert calls[0]["id"] == calls[1]["id"] == (tmp_path / "wandb_id").read_text().strip()
    assert (calls[0]["entity"], calls[0]["group"], calls[0]["tags"]) == ("team", "g", ["a"])


def test_nothing_of_the_environment_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hush-hush-123456")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    monkeypatch.setattr(sys, "argv", ["train", "on-the-command-line-9876"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    one_start(tmp_path, range(1, 3), mode=None)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        content = path.read_bytes()
        for secret in (b"hush-hush", b"0123456789abcdef0123", b"command-line-9876"):
            assert secret not in content, path


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.dict(sys.modules, {"wandb": None}), pytest.raises(UserError, match=r"requirements-wandb\.txt"):
        WandbRun(WandbArgs(project="ours"), tmp_path, CONFIG)
    with mock.patch("requests.head"), pytest.raises(UserError, match=r"No API key configured.*mode=offline"):
        WandbRun(WandbArgs(project="ours", mode="online"), tmp_path, CONFIG)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    wandb.teardown()
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 does not answer.*mode=offline"):
        WandbRun(WandbArgs(project="ours"), tmp_path, CONFIG)
    (tmp_path / "wandb_id").write_text("")
    with pytest.raises(UserError, match="wandb_id: expected the id"):
        WandbRun(WandbArgs(project="ours", mode="offline"), tmp_path, CONFIG)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match=r"logging\.wandb\.mode=sometimes"):
        WandbArgs(project="ours", mode="sometimes")
    with pytest.raises(UserError, match=r"logging\.wandb\.tags is given, but logging\.wandb\.project is not"):
        WandbArgs(tags=["a"])
