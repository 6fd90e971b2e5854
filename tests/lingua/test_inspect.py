import io
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from lingua.args import parse
from lingua.data import DataArgs, TokenStream
from lingua.errors import UserError
from lingua.inspect import HIDDEN, PLAIN, InspectArgs, inspect, marked
from lingua.masking import split_positions
from lingua.tokenizer import TokenizerArgs, TrainArgs, build_tokenizer, train
from lingua.verify import VerifyArgs, verify_all
from tests.support import ROOT, environment, made_up_documents, prepare


def printed(corpus, *words):
    out = io.StringIO()
    inspect(parse(InspectArgs, [f"data.root_dir={corpus}", "data.seq_len=64", *words]), out)
    return out.getvalue()


def test_rows_are_those_of_the_stream_with_their_documents_and_masks(corpus):
    tokenizer = build_tokenizer(TokenizerArgs())
    stream = TokenStream(DataArgs(root_dir=str(corpus), seq_len=64), tokenizer, 7)
    for index in (0, 1, 5):
        text = printed(corpus, f"first={index}", "rows=1", "seed=7", "hidden_ratio=0.25")
        heading, _, body = text.partition("\n")
        row = stream.row(index)
        n_documents = int((row[1:] == 0).sum())
        assert heading == f"row {index}: 64 tokens, {n_documents} documents begin in it, 16 tokens hidden"
        assert body.count("\n<s>") + body.count("\n⟦<s>⟧") == n_documents
        assert body.replace("⟦", "").replace("⟧", "").replace("\n", "") == tokenizer.decode(row)
        view = split_positions(torch.tensor([index]), 64, 0.25, 7)
        hidden = tokenizer.decode(row[view.hidden_BM[0].numpy()])
        assert "".join(re.findall("⟦(.*?)⟧", body)) == hidden
        inverse = printed(corpus, f"first={index}", "rows=1", "seed=7", "hidden_ratio=0.25", "inverse=true")
        visible = tokenizer.decode(row[view.visible_BT[0].numpy()])
        assert "".join(re.findall("⟦(.*?)⟧", inverse)) == visible
        assert "⟦" not in printed(corpus, f"first={index}", "hidden_ratio=0")


def test_rows_of_any_phase_are_those_of_the_run(corpus):
    """A run of 4 rows a step whose second phase has rows half as long and whose third has another mix."""
    prepared = ["data.phases=[{from_tokens: 1500, seq_len: 32}, {from_tokens: 4000, seq_len: 128}]"]
    words = [*prepared, "batch_tokens=512", "views=2", "seed=7", "rows=3", "hidden_ratio=0.25"]
    args = parse(InspectArgs, [f"data.root_dir={corpus}", "data.seq_len=64", *words]).data
    tokenizer = build_tokenizer(TokenizerArgs())
    stream = TokenStream(args, tokenizer, 7, rows_per_step=4, micro_rows=2, views=2)
    # phases begin after the step that reaches 1,500 and 4,000 view tokens: steps 1-3, 4-8 and 9 on
    for phase, step, seq_len, per_step in ((0, 1, 64, 4), (1, 4, 32, 8), (2, 9, 128, 2)):
        rows = torch.cat([part.tokens_BS for number in (step, step + 1) for part in stream.step_rows(number)])[:3]
        index = torch.cat([part.index_B for number in (step, step + 1) for part in stream.step_rows(number)])[:3]
        out = printed(corpus, *words, f"phase={phase}").split("\n\n")[:3]
        for number, (text, tokens, row) in enumerate(zip(out, rows, index.tolist(), strict=True)):
            heading, _, body = text.partition("\n")
            assert heading.startswith(
                f"row {row} (phase {phase}, step {step + number // per_step}): {seq_len} tokens, "
            )
            assert body.replace("⟦", "").replace("⟧", "").replace("\n", "") == tokenizer.decode(tokens.numpy())
            hidden = split_positions(torch.tensor([row]), seq_len, 0.25, 7).hidden_BM[0]
            assert "".join(re.findall("⟦(.*?)⟧", body)) == tokenizer.decode(tokens[hidden].numpy())
    for bad, message in (
        (["phase=3"], "phase=3: data.phases has 2, so expected 0 to that"),
        (["first=10"], "first=10 rows=3: phase 0 has only 12 rows"),
        (["batch_tokens=500"], "batch_tokens=500 views=2: not a whole number of rows of data.seq_len=64"),
        (["views=0"], "batch_tokens=512 views=0: not a whole number"),
    ):
        with pytest.raises(UserError, match=message):
            printed(corpus, *words, *bad)
    with pytest.raises(UserError, match=r"phase=1: data\.phases has 0"):
        printed(corpus, "phase=1")


def test_colours(corpus):
    text = printed(corpus, "color=always", "rows=1")
    assert text.count(HIDDEN) > 5
    plain = re.sub("\033\\[[0-9;]*m", "", text)
    assert plain == printed(corpus, "rows=1").replace("⟦", "").replace("⟧", "")


def test_a_hidden_part_of_a_character_and_of_a_word():
    tokenizer = build_tokenizer(TokenizerArgs("bytes"))
    ids = tokenizer.encode_batch(["aé"])[0]
    assert marked(ids, np.array([False, True, True]), tokenizer, False) == "a⟦é⟧"
    assert marked(ids, np.array([False, False, True]), tokenizer, False) == "a\ufffd⟦\ufffd⟧"
    assert marked(ids, np.array([False, True, True]), tokenizer, True) == f"a{HIDDEN}é{PLAIN}"


def test_spaces_of_sentencepiece_stay(tmp_path):
    lines = tmp_path / "a.txt"
    lines.write_text("\n".join(made_up_documents(200)))
    train(TrainArgs(input=str(lines), out=f"{tmp_path}/v.model", vocab_size=60, character_coverage=1.0))
    tokenizer = build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/v.model"))
    ids = np.array([tokenizer.bos_id, *tokenizer.encode_batch(["the cat sees the sea"])[0], tokenizer.eos_id])
    hidden = np.arange(len(ids)) % 2 == 1
    text = marked(ids, hidden, tokenizer, False)
    assert text.replace("⟦", "").replace("⟧", "") == "<s>the cat sees the sea</s>"


def test_the_commands(corpus):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment() | {"COLUMNS": "80"},
            capture_output=True,
            text=True,
        )

    done = run("lingua.inspect", f"data.root_dir={corpus}", "data.seq_len=32", "rows=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens hidden") == 3
    done = run("lingua.verify", f"folder={corpus}")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"made_up/train: good: [\d,]+ tokens, [\d,]+ documents, \d+ tokens a document, at most", done.stdout
    )
    done = run("lingua.inspect", f"data.root_dir={corpus}", "hidden_ratio=1.5")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "hidden ratio 1.5" in done.stderr


def test_into_a_pipe_that_closes_early(corpus):
    words = [sys.executable, "-m", "lingua.inspect", f"data.root_dir={corpus}", "rows=50"]
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"row 0: ")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141  # as the shell says of a command that SIGPIPE ended


def test_bad_settings():
    with pytest.raises(UserError, match="first=-1"):
        InspectArgs(first=-1)
    with pytest.raises(UserError, match="color=blue: expected always, never or auto"):
        InspectArgs(color="blue")


def test_every_damaged_split_is_named(tmp_path, capsys):
    root = prepare(tmp_path, made_up_documents(100))
    prepare(tmp_path, made_up_documents(100, seed=1), name="other")
    shutil.copytree(root / "other", root / "third.partial")
    verify_all(VerifyArgs(str(root)))
    out = capsys.readouterr().out
    assert out.count(": good: ") == 4
    assert "third.partial: unfinished, not checked" in out
    verify_all(VerifyArgs(str(root / "other")))
    verify_all(VerifyArgs(str(root / "other" / "train")))
    for name in ("made_up/train", "other/valid"):
        with (root / name / "shard_00000.tokens").open("r+b") as file:
            file.seek(4)
            file.write(os.urandom(2))
    with pytest.raises(UserError, match="2 of 4 splits are damaged"):
        verify_all(VerifyArgs(str(root)))
    said = capsys.readouterr().err
    assert said.count("corrupt: sha256") == 2
    with pytest.raises(UserError, match="folder=s3://b/x: only what is on a disk can be verified"):
        verify_all(VerifyArgs("s3://b/x"))
    with pytest.raises(UserError, match="no prepared data here"):
        verify_all(VerifyArgs(str(tmp_path / "nowhere")))


def test_totals_that_do_not_add_up(tmp_path):
    root = prepare(tmp_path, made_up_documents(100))
    path = root / "made_up" / "train" / "manifest.json"
    text = path.read_text()
    path.write_text(re.sub(r'"documents": \d+', '"documents": 7', text, count=1))
    with pytest.raises(UserError, match="splits are damaged"):
        verify_all(VerifyArgs(str(root)))
