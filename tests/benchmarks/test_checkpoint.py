import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import CheckpointBenchmarkArgs, main, model_and_optimizer, summary, table, ways
from lingua.checkpoint import find_damage, load
from lingua.errors import UserError


def test_it_measures_all_three_ways_and_records_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    main(CheckpointBenchmarkArgs(str(out), rounds=2, dim=32, n_layers=1, vocab_size=100))
    result = json.loads(out.read_text())
    parameters = 100 * 32 + 32 + 2 * 32 + 4 * 32 * 32 + 3 * 32 * 256
    assert result["parameters"] == parameters
    assert set(result["ways"]) == {"asynchronous", "synchronous", "torch.save"}
    for found in result["ways"].values():
        assert len(found["blocked"]) == len(found["whole"]) == 2
        assert all(0 < blocked <= whole for blocked, whole in zip(found["blocked"], found["whole"], strict=True))
        assert 12 * parameters < found["bytes"] < 14 * parameters + 50_000  # weights and two moments in fp32
    assert result["device"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    assert "until written" in capsys.readouterr().out


def test_what_is_timed_is_a_whole_checkpoint(tmp_path: Path) -> None:
    args = CheckpointBenchmarkArgs("x", dim=32, n_layers=1, vocab_size=100)
    model, adamw = model_and_optimizer(args, torch.device("cpu"))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for way, save in ways(model, adamw, tmp_path).items():
        blocked, whole = save()
        assert 0 < blocked <= whole
        if way == "torch.save":
            stored = torch.load(tmp_path / "plain.pt")
            assert len(stored["optimizer"]["state"]) == len(expected)
            continue
        folder = tmp_path / way / "0000000001"
        assert find_damage(folder, checksums=True) is None
        other, other_adamw = model_and_optimizer(args, torch.device("cpu"))
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        load(folder, other, other_adamw)
        assert all(torch.equal(p, expected[name]) for name, p in other.named_parameters())


def test_a_slow_disk_blocks_a_save_in_place_and_not_one_beside(tmp_path: Path, monkeypatch) -> None:
    from lingua.storage import Writer

    real = Writer.finish

    def slow(self: Writer, **given: object) -> None:
        time.sleep(0.5)
        real(self, **given)

    monkeypatch.setattr(Writer, "finish", slow)
    model, adamw = model_and_optimizer(
        CheckpointBenchmarkArgs("x", dim=32, n_layers=1, vocab_size=100), torch.device("cpu")
    )
    functions = ways(model, adamw, tmp_path)
    blocked, whole = functions["asynchronous"]()
    assert blocked < 0.5 <= whole
    blocked, whole = functions["synchronous"]()
    assert blocked >= 0.5


def test_the_summary_by_hand() -> None:
    results = {
        "asynchronous": {"blocked": [1.0, 2.0, 9.0], "whole": [8.0, 8.0, 10.0]},
        "synchronous": {"blocked": [10.0, 8.0, 100.0], "whole": [10.0, 8.0, 100.0]},
        "torch.save": {"blocked": [4.0, 5.0, 3.0], "whole": [4.0, 5.0, 3.0]},
    }
    found = summary(results)
    assert found["median_blocked"] == {"asynchronous": 2.0, "synchronous": 10.0, "torch.save": 4.0}
    assert found["bar"]["value"] == 0.2
    assert found["bar"]["met"]
    assert found["asynchronous_of_torch.save"] == 0.5
    results["asynchronous"]["blocked"] = [2.1]
    assert not summary(results)["bar"]["met"]
    assert "2.10 (2.10 to 2.10)" in table(results)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="rounds=0: expected at least 1"):
        CheckpointBenchmarkArgs("x", rounds=0)
