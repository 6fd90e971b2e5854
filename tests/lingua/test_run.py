"""Whole runs of both apps: the same bits again, after kills, and what a resumed run may change."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lingua.checkpoint import complete_checkpoints
from lingua.errors import UserError
from lingua.metrics import read_metrics
from tests.support import ROOT, command, deterministic, environment, run_app, run_command, tiny_words

APPS = ["bert", "crossbert"]


def records(run: Path) -> list[dict]:
    return deterministic(read_metrics(run / "metrics.jsonl"))


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One uninterrupted tiny run of each app."""
    folder = tmp_path_factory.mktemp("finished")
    for app in APPS:
        run_app(app, tiny_words(app, corpus, folder / app, checkpoint__dump__every=10))
    return {app: folder / app for app in APPS}


@pytest.mark.parametrize("app", APPS)
def test_the_run_folder_has_what_it_should(finished: dict[str, Path], app: str) -> None:
    run = finished[app]
    assert [folder.name for folder in complete_checkpoints(run / "checkpoints")] == [
        "0000000010",
        "0000000020",
        "0000000030",
    ]
    assert (run / "config.yaml").is_file()
    assert "step 30/30" in (run / "train.log").read_text()
    steps = [record for record in records(run) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    views = 2 if app == "crossbert" else 1
    assert steps[-1]["data_tokens"] == 30 * 256
    assert steps[-1]["tokens"] == 30 * 256 * views
    assert steps[-1]["epoch/made_up"] > 0
    validations = [record for record in records(run) if "valid/made_up/loss@0.5" in record]
    assert [record["step"] for record in validations] == [15, 30]
    assert set(validations[0]) == {"step", *(f"valid/made_up/loss@{ratio}" for ratio in (0.15, 0.3, 0.5))}


@pytest.mark.parametrize("app", APPS)
def test_the_same_seed_gives_the_same_bits_and_another_does_not(
    finished: dict[str, Path], corpus: Path, tmp_path: Path, app: str
) -> None:
    run_app(app, tiny_words(app, corpus, tmp_path / "again", checkpoint__dump__every=10))
    assert records(tmp_path / "again") == records(finished[app])
    run_app(app, tiny_words(app, corpus, tmp_path / "other", seed=1, steps=2))
    assert records(tmp_path / "other")[0]["loss"] != records(finished[app])[0]["loss"]


@pytest.mark.parametrize("app", APPS)
def test_micro_batches_do_not_change_the_mathematics(corpus: Path, tmp_path: Path, app: str) -> None:
    losses = []
    for micro_rows in (8, 3, 1):  # 3 does not divide 8: the last micro-batch is padded
        words = tiny_words(app, corpus, tmp_path / str(micro_rows), micro_rows=micro_rows, dtype="fp64", steps=5)
        run_app(app, words)
        losses.append([record["loss"] for record in records(tmp_path / str(micro_rows)) if "loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # the metrics' losses are summed in fp32 over targets
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def kill_at_random(words: list[str], run: Path, first: int, last: int, seed: int) -> int:
    """Start a run, SIGKILL it once a random step is in its metrics, and return the last step that is."""
    step = random.Random(seed).randint(first, last)
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120

    def reached() -> int:
        return max((record["step"] for record in read_metrics(run / "metrics.jsonl")), default=0)

    while reached() < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return reached()


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_two_sigkills_leave_no_trace(corpus: Path, tmp_path: Path, app: str) -> None:
    settings = {"steps": 300, "checkpoint__dump__every": 7, "validation__every": 100}
    run_app(app, tiny_words(app, corpus, tmp_path / "whole", **settings))
    run = tmp_path / "killed"
    words = command(app, tiny_words(app, corpus, run, **settings))
    seed = int.from_bytes(os.urandom(4))
    print("kills are drawn from seed", seed)
    first = kill_at_random(words, run, 10, 120, seed)
    second = kill_at_random(words, run, first + 10, 250, seed + 1)
    assert second > first
    done = run_command(words)
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout
    assert records(run) == records(tmp_path / "whole")


@pytest.mark.parametrize("app", APPS)
def test_a_run_resumed_between_checkpoints_gives_the_same_bits(
    finished: dict[str, Path], corpus: Path, tmp_path: Path, app: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lingua.run import Run

    class Killed(BaseException):
        pass

    real_save = Run.save

    def save(self: Run, step: int, *args: str) -> None:
        real_save(self, step, *args)
        if step == 17:
            raise Killed

    words = tiny_words(app, corpus, tmp_path / "run", checkpoint__dump__every=10)
    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(Killed):
        run_app(app, words)
    monkeypatch.undo()
    assert records(tmp_path / "run")[-1]["step"] == 17
    run_app(app, words)
    assert records(tmp_path / "run") == records(finished[app])  # learning rate included


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR2, 140)])
def test_a_signal_saves_and_stops(finished, corpus: Path, tmp_path: Path, signum, status: int, monkeypatch) -> None:
    from lingua.optim import Optimizer

    real_step = Optimizer.step

    def step(self: Optimizer, number: int, *args):
        if number == 13:
            os.kill(os.getpid(), signum)
        return real_step(self, number, *args)

    words = tiny_words("crossbert", corpus, tmp_path / "run", checkpoint__dump__every=10)
    monkeypatch.setattr(Optimizer, "step", step)
    with pytest.raises(SystemExit) as stop:
        run_app("crossbert", words)
    assert stop.value.code == status
    monkeypatch.undo()
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "0000000013"
    run_app("crossbert", words)
    assert records(tmp_path / "run") == records(finished["crossbert"])


def test_a_finished_run_started_again_says_so(finished, corpus: Path, capsys: pytest.CaptureFixture) -> None:
    before = (finished["bert"] / "metrics.jsonl").read_bytes()
    run_app("bert", tiny_words("bert", corpus, finished["bert"], checkpoint__dump__every=10))
    assert "finished already, 30 of 30 steps done" in capsys.readouterr().out
    assert (finished["bert"] / "metrics.jsonl").read_bytes() == before


def test_a_run_can_be_repeated_from_its_config_file(finished: dict[str, Path], tmp_path: Path) -> None:
    run_app("crossbert", [f"config={finished['crossbert'] / 'config.yaml'}", f"dump_dir={tmp_path}"])
    assert records(tmp_path) == records(finished["crossbert"])


def test_a_resumed_run_may_change_only_what_it_names(corpus: Path, tmp_path: Path) -> None:
    run_app("bert", tiny_words("bert", corpus, tmp_path, steps=4))
    with pytest.raises(UserError, match=r"run with steps=4, this command says steps=6.*allow.*resume\.allow=\[steps\]"):
        run_app("bert", tiny_words("bert", corpus, tmp_path, steps=6, micro_rows=2))
    assert OmegaConf.load(tmp_path / "config.yaml").steps == 4
    run_app("bert", tiny_words("bert", corpus, tmp_path, steps=6, micro_rows=2, resume__allow="[steps]"))
    assert [record["step"] for record in records(tmp_path) if "loss" in record] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match=r"model\.dim=32, this command says model\.dim=64"):
        run_app("bert", tiny_words("bert", corpus, tmp_path, steps=6, model__dim=64))
    with pytest.raises(UserError, match=r"has shape .*, the model's is"):
        run_app("bert", tiny_words("bert", corpus, tmp_path, steps=6, model__dim=64, resume__allow="[model.dim]"))


def test_non_finite_steps_are_skipped_counted_and_at_last_end_the_run(
    corpus: Path, tmp_path: Path, monkeypatch
) -> None:
    from apps.bert.model import Bert
    from lingua.loss import LossSum

    real, calls = Bert.forward, []

    def forward(self: Bert, *args) -> LossSum:
        part = real(self, *args)
        calls.append(0)
        bad = self.training and (len(calls) in (3, 4) or len(calls) > 10)
        return LossSum(part.loss * float("nan"), part.targets) if bad else part

    monkeypatch.setattr(Bert, "forward", forward)
    words = tiny_words("bert", corpus, tmp_path, micro_rows=8, validation__every=100, optim__max_nonfinite=5)
    with pytest.raises(UserError, match="step 15: 5 steps in a row had a non-finite loss or gradient"):
        run_app("bert", words)
    skipped = [record["skipped_steps"] for record in records(tmp_path)]
    assert skipped == [0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 4, 5, 6, 7]
    assert all(torch.isfinite(torch.tensor(record["loss"])) for record in records(tmp_path)[4:10])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_tokens": 500},
            "batch_tokens=500 is not a whole number of rows: .* counts 64 tokens with 2 views; .* 512",
        ),
        ({"batch_tokens": 10}, "nearest that fits is 64"),
        ({"tokens": 1e6}, "give exactly one of steps, tokens and flops; found .*steps.*tokens"),
        ({"steps": 0}, "steps=0: expected more than 0"),
        ({"masking.hidden_ratio": 1.0}, r"hidden ratio 1\.0"),
        ({"masking.hidden_ratio": 0.0}, r"hidden ratio 0\.0"),
        ({"validation.ratios": "[0.001]"}, r"hidden ratio 0\.001"),
        ({"model.dim": 34}, "head size must be even"),
        ({"model.vocab_size": 7}, r"model\.vocab_size=7, but the tokenizer has 50265"),
        ({"data.root_dir": "nowhere"}, r"data\.root_dir=nowhere: no such folder"),
        ({"data.validation.made_up": "nowhere"}, "nowhere: no such folder"),
        ({"dtype": "fp8"}, "dtype=fp8: expected auto, bf16, fp32, fp64"),
        ({"model.dmi": 3}, r"unknown key model\.dmi: did you mean model\.dim\?"),
        ({"micro_rows": 0}, "micro_rows=0"),
        ({"logging.every": 0}, r"logging\.every=0"),
        ({"dump_dir": "/proc/nothing"}, "dump_dir=/proc/nothing: cannot be written"),
    ],
)
def test_mistakes_are_named_before_any_work(corpus: Path, tmp_path: Path, changes: dict, message: str) -> None:
    words = {word.split("=")[0]: word for word in tiny_words("crossbert", corpus, tmp_path / "run")}
    words |= {key: f"{key}={value}" for key, value in changes.items()}
    with pytest.raises(UserError, match=message):
        run_app("crossbert", list(words.values()))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_mistake_on_the_command_line_prints_one_line(corpus: Path, tmp_path: Path) -> None:
    done = run_command(command("bert", tiny_words("bert", corpus, tmp_path, model__n_heads=5)))
    assert done.returncode == 2
    assert done.stderr == "error: model.dim=32 does not split into model.n_heads=5 equal heads\n"


def test_length_by_tokens_and_flops(corpus: Path, tmp_path: Path) -> None:
    for name, changes in {"tokens": {"tokens": 5 * 256}, "flops": {"flops": 5 * 256 * 6 * 2 * 28672 + 1}}.items():
        words = [w for w in tiny_words("bert", corpus, tmp_path / name, **changes) if not w.startswith("steps=")]
        run_app("bert", words)
    # F = 6 N + 12 d L S with N = 2 (4 * 32^2 + 3 * 32 * 256) and S = 32: the same 5 steps are not the same FLOPs.
    per_token = 6 * 2 * (4 * 32**2 + 3 * 32 * 256) + 12 * 32 * 2 * 32
    assert records(tmp_path / "tokens")[-1]["step"] == 5
    assert records(tmp_path / "tokens")[-2]["flops"] == 5 * 256 * per_token
    assert records(tmp_path / "flops")[-1]["step"] == round(5 * 256 * 6 * 2 * 28672 / per_token / 256)


@pytest.mark.parametrize("app", APPS)
def test_a_run_in_phases_resumes_and_counts_as_one(corpus: Path, tmp_path: Path, app: str) -> None:
    views = 2 if app == "crossbert" else 1
    phases = [{"from_tokens": 6 * 256 * views, "seq_len": 64}, {"from_tokens": 9 * 256 * views, "seq_len": 16}]
    words = {"data__phases": str(phases).replace("'", ""), "validation__every": 100, "checkpoint__dump__every": 4}
    run_app(app, tiny_words(app, corpus, tmp_path / "whole", steps=12, **words))
    whole = records(tmp_path / "whole")
    run_app(app, tiny_words(app, corpus, tmp_path / "two", steps=12, **words))
    shutil.rmtree(tmp_path / "two/checkpoints/0000000012")
    run_app(app, tiny_words(app, corpus, tmp_path / "two", steps=12, **words))  # again from step 8
    assert records(tmp_path / "two") == whole
    # F = 6 N + 12 d L S, the predictor's a second block of half the weight (complementary masks)
    block = 6 * (4 * 32**2 + 3 * 32 * 256)
    blocks = 2 if app == "bert" else 1.5

    def flops(steps: int, seq_len: int) -> float:
        return steps * 256 * views * blocks * (block + 12 * 32 * seq_len)

    last = [record for record in whole if "loss" in record][-1]
    assert last["flops"] == flops(6, 32) + flops(3, 64) + flops(3, 16)
    assert last["data_tokens"] == 12 * 256
    # The same length, given in FLOPs.
    words = [w for w in tiny_words(app, corpus, tmp_path / "flops", **words) if not w.startswith("steps=")]
    run_app(app, [*words, f"flops={last['flops']}"])
    assert records(tmp_path / "flops") == whole


def test_a_new_run_starts_from_the_weights_of_another(finished: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    settings = {"init__path": finished["bert"], "steps": 3, "validation__every": 100, "optim__warmup": 0}
    run_app("bert", tiny_words("bert", corpus, tmp_path / "weights", **settings))
    first, before = records(tmp_path / "weights")[0], records(finished["bert"])
    assert first["epoch/made_up"] == before[0]["epoch/made_up"]  # the data from its beginning
    assert first["loss"] < before[0]["loss"] - 1
    with pytest.raises(UserError, match=r"w13\.weight has shape"):
        run_app("bert", tiny_words("bert", corpus, tmp_path / "shape", model__ffn_dim=64, **settings))
    with pytest.raises(UserError, match=r"has no model\.predictor"):
        run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / "app", **settings))
    with pytest.raises(UserError, match=r"init\.optimizer and init\.position need init\.path"):
        run_app("bert", tiny_words("bert", corpus, tmp_path / "none", init__optimizer="true"))


@pytest.mark.parametrize("app", APPS)
def test_a_decay_branch_goes_on_as_the_run_itself_would(corpus: Path, tmp_path: Path, app: str) -> None:
    """At a constant rate, branching off with optimizer and position is the same as not branching off."""
    same = {"optim__scheduler": "constant", "optim__warmup": 0, "checkpoint__dump__every": 4, "validation__every": 100}
    run_app(app, tiny_words(app, corpus, tmp_path / "trunk", steps=8, **same))
    branch = {"init__path": tmp_path / "trunk/checkpoints/0000000004", "init__optimizer": "true"}
    branch |= {"init__position": "true", **same, "checkpoint__dump__every": 2}
    words = tiny_words(app, corpus, tmp_path / "branch", steps=4, **branch)
    run_app(app, words)

    def figures(run: Path) -> list[tuple]:
        return [(r["loss"], r["grad_norm"], r["epoch/made_up"]) for r in records(run) if "loss" in r]

    expected = figures(tmp_path / "trunk")[4:]
    assert figures(tmp_path / "branch") == expected
    shutil.rmtree(tmp_path / "trunk")  # a branch with a checkpoint of its own no longer needs it
    shutil.rmtree(tmp_path / "branch/checkpoints/0000000004")
    run_app(app, words)
    assert figures(tmp_path / "branch") == expected
    shutil.rmtree(tmp_path / "branch")
    with pytest.raises(UserError, match=r"trunk/checkpoints/0000000004: no such run or checkpoint folder"):
        run_app(app, words)


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_compiled_blocks_give_the_same_losses(
    finished: dict[str, Path], corpus: Path, tmp_path: Path, app: str
) -> None:
    more = {"data__validation__more": corpus / "made_up/train", "validation__rows": 45, "validation__batch_rows": 7}
    words = tiny_words(app, corpus, tmp_path, compile="true", checkpoint__dump__every=10, **more)
    run_app(app, words)  # sets and ratios of many shapes beside the training's
    compiled = [record["loss"] for record in records(tmp_path) if "loss" in record]
    assert compiled == pytest.approx([r["loss"] for r in records(finished[app]) if "loss" in r], rel=1e-4)
