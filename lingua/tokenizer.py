"""Text to token ids and back.

Two kinds live here: ``roberta`` (byte-level BPE with RoBERTa's ids, complete in this package) and
``sentencepiece`` (a ``.model`` file; ``python -m lingua.tokenizer train`` makes one from a corpus); those from
elsewhere are in :mod:`lingua.vocabularies`. Special tokens exist only as ids: a text that contains ``<mask>`` or
``</s>`` is encoded as the characters it is.
"""

from __future__ import annotations

import abc
import base64
import gzip
import hashlib
import heapq
import io
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lingua.args import cli
from lingua.errors import UserError
from lingua.files import list_files, write_atomically
from lingua.hashing import counter_hash
from lingua.preparation.readers import ReaderArgs, documents
from lingua.progress import Progress

KINDS = ("roberta", "sentencepiece", "tiktoken", "hf", "bytes")
WITH_PATH = ("sentencepiece", "tiktoken", "hf")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@dataclass
class TokenizerArgs:
    """Which tokenizer, and the file it is read from."""

    name: str = "roberta"  # roberta | sentencepiece | tiktoken | hf | bytes
    # sentencepiece: a .model file; tiktoken: its file; hf: a tokenizer.json, a folder with one, or an id on the hub
    path: str | None = None
    pattern: str | None = None  # tiktoken: how text is cut: cl100k (none: this one) | gpt2 | a regular expression

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise UserError(f"tokenizer.name={self.name}: expected one of {', '.join(KINDS)}")
        if (self.path is None) == (self.name in WITH_PATH):
            need = "needs path=FILE" if self.path is None else f"takes no path, found path={self.path}"
            raise UserError(f"tokenizer.name={self.name} {need}")
        if self.pattern is not None and self.name != "tiktoken":
            raise UserError(f"tokenizer.name={self.name} takes no pattern, found pattern={self.pattern}")


def build_tokenizer(args: TokenizerArgs) -> Tokenizer:
    """The tokenizer that ``args`` names, its special tokens checked. Raises UserError if its file is missing or
    unusable."""
    if args.name == "roberta":
        return RobertaTokenizer()
    if args.name == "sentencepiece":
        return SentencePieceTokenizer(args.path or "")
    from lingua.vocabularies import BytesTokenizer, HFTokenizer, TiktokenTokenizer

    if args.name == "bytes":
        return BytesTokenizer()
    path = args.path or ""
    tokenizer = TiktokenTokenizer(path, args.pattern) if args.name == "tiktoken" else HFTokenizer(path)
    check_specials(tokenizer, f"tokenizer.path={args.path}")
    return tokenizer


def check_specials(tokenizer: Tokenizer, where: str) -> None:
    """Raise UserError unless the mask has an id of its own and no text becomes a special token."""
    others = {tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id}
    if tokenizer.mask_id in others:
        raise UserError(f"{where}: <mask> shares id {tokenizer.mask_id} with another special token")
    special = [i for i in tokenizer.special_ids if i != tokenizer.unk_id]
    names = [tokenizer.decode([i]) for i in special]
    for name, ids in zip(names, tokenizer.encode_batch(names), strict=True):
        if set(ids.tolist()) & set(special):
            raise UserError(f"{where}: the text {name!r} is encoded as a special token, so a corpus could hold masks")


def save_copy(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy a tokenizer's files to ``folder``, so that a run is usable without the rest of the disk."""
    if tokenizer.files:
        folder.mkdir(exist_ok=True)
        for file in tokenizer.files:
            if file.resolve() != (folder / file.name).resolve():  # a resumed run reads its own copy
                shutil.copyfile(file, folder / file.name)


def prefer_copy(args: TokenizerArgs, folder: Path) -> TokenizerArgs:
    """``args`` with its path turned to the copy in ``folder``, if :func:`save_copy` made one."""
    if args.path is None or not folder.is_dir():
        return args
    copy = folder if args.name == "hf" else next(folder.iterdir())
    return replace(args, path=str(copy))


class Tokenizer(abc.ABC):
    """What every kind has.

    Attributes:
        vocab_size: number of ids; all ids are below it.
        bos_id, pad_id, eos_id, unk_id, mask_id: ids of ``<s> <pad> </s> <unk> <mask>``.
        special_ids: every id that no text produces, ascending (``<unk>`` is among them even for vocabularies
            that use it for unknown characters).
        appended: names of those of the five that the vocabulary did not have.
    """

    kind: str
    vocab_size: int
    bos_id: int
    pad_id: int
    eos_id: int
    unk_id: int
    mask_id: int
    special_ids: tuple[int, ...]
    files: tuple[Path, ...] = ()  # what it was read from
    appended: tuple[str, ...] = ()
    _sha256: str  # over the vocabulary

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, without special tokens. Lone surrogates are read as U+FFFD."""

    @abc.abstractmethod
    def spans(self, text: str) -> np.ndarray:
        """Which characters of a text without surrogates each id of :meth:`encode_batch` stands for: int64 [n, 2], the
        first and one past the last. A character that several ids share belongs to each of them, or to one where the
        others came out of normalization; spaces belong to some id or none."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens by name, incomplete UTF-8 as U+FFFD."""

    def identity(self) -> dict[str, Any]:
        """What two tokenizers must share for their ids to mean the same; plain JSON values, no path."""
        ids = {name: getattr(self, f"{name}_id") for name in ("bos", "pad", "eos", "unk", "mask")}
        return {"kind": self.kind, "vocab_size": self.vocab_size, "special_ids": ids, "sha256": self._sha256}

    def _check_ids(self, ids: Iterable[int]) -> list[int]:
        checked = [int(i) for i in ids]
        for i in checked:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token id {i} is outside this vocabulary of {self.vocab_size} ids")
        return checked


class RobertaTokenizer(Tokenizer):
    """GPT-2's byte-level BPE with RoBERTa's 50,265 ids (Liu et al. 2019, as in fairseq and transformers)."""

    kind = "roberta"
    vocab_size = 50_265
    bos_id, pad_id, eos_id, unk_id, mask_id = 0, 1, 2, 3, 50_264
    _NAMES = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>", 50_260: "<|endoftext|>", 50_261: "madeupword0000",
              50_262: "madeupword0001", 50_263: "madeupword0002", 50_264: "<mask>"}  # fmt: skip
    special_ids = tuple(_NAMES)
    _FIRST_ID = 4  # of the BPE tokens
    # GPT-2's pattern, in the possessive form that tiktoken runs fastest
    PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

    def __init__(self) -> None:
        import tiktoken

        table = gzip.decompress((Path(__file__).parent / "assets" / "roberta_bpe.txt.gz").read_bytes())
        self.token_bytes: list[bytes] = []  # of id _FIRST_ID + i
        ranks = []
        for line in table.splitlines():
            token, rank = line.split()
            self.token_bytes.append(base64.b64decode(token))
            ranks.append(int(rank))
        self.ranks = dict(zip(self.token_bytes, ranks, strict=True))
        self._sha256 = hashlib.sha256(table).hexdigest()
        self._id_of_rank = np.empty(len(ranks), dtype=np.int32)
        self._id_of_rank[ranks] = np.arange(self._FIRST_ID, self._FIRST_ID + len(ranks), dtype=np.int32)
        self._bpe = tiktoken.Encoding("roberta", pat_str=self.PATTERN, mergeable_ranks=self.ranks, special_tokens={})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # encode_to_numpy spares the Python list of every id, which pays for the renumbering.
        return [self._id_of_rank[self._bpe.encode_to_numpy(valid_text(text))] for text in texts]

    def spans(self, text: str) -> np.ndarray:
        (ids,) = self.encode_batch([text])
        return byte_spans(text, [len(self.token_bytes[i - self._FIRST_ID]) for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        parts = [
            self._NAMES[i].encode() if i in self._NAMES else self.token_bytes[i - self._FIRST_ID]
            for i in self._check_ids(ids)
        ]
        return b"".join(parts).decode("utf-8", "replace")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model (Kudo and Richardson 2018) that defines ``<s> <pad> </s> <unk> <mask>``.

    The model's own normalization applies (of those trained here: NFKC, and runs of white space to one space).

    Raises UserError if the file is missing, is not a model, or lacks one of the five.
    """

    kind = "sentencepiece"

    def __init__(self, path: str) -> None:
        import sentencepiece

        if not Path(path).is_file():
            raise UserError(
                f"tokenizer.path={path}: no such file (python -m lingua.tokenizer train makes a vocabulary)"
            )
        model = Path(path).read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # the binding raises plain RuntimeError
            raise UserError(f"tokenizer.path={path}: not a SentencePiece model: {error}") from None
        self.vocab_size = self._processor.vocab_size()
        self._sha256, self.files = hashlib.sha256(model).hexdigest(), (Path(path),)
        ids = [self._processor.piece_to_id(name) for name in SPECIALS]
        for name, index in zip(SPECIALS, ids, strict=True):
            is_special = self._processor.is_control(index) or self._processor.is_unknown(index)
            if self._processor.id_to_piece(index) != name or not is_special:
                raise UserError(
                    f"tokenizer.path={path}: no special piece {name}; train a vocabulary with "
                    "python -m lingua.tokenizer train, which defines " + " ".join(SPECIALS)
                )
        self.bos_id, self.pad_id, self.eos_id, self.unk_id, self.mask_id = ids
        self.special_ids = tuple(
            i
            for i in range(self.vocab_size)
            if self._processor.is_control(i) or self._processor.is_unknown(i) or self._processor.is_unused(i)
        )
        self._special = frozenset(self.special_ids)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._processor.encode([valid_text(text) for text in texts], num_threads=1)
        return [np.array(ids, dtype=np.int32) for ids in encoded]

    def spans(self, text: str) -> np.ndarray:
        found = self._processor.encode(text, return_type="offset_mapping")["offsets"]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        run: list[int] = []  # SentencePiece drops control pieces, so it decodes only what is between them
        for i in self._check_ids(ids):
            if i in self._special:
                parts += [self._processor.decode(run), self._processor.id_to_piece(i)]
                run = []
            else:
                run.append(i)
        return "".join([*parts, self._processor.decode(run)])


def byte_spans(text: str, sizes: Sequence[int]) -> np.ndarray:
    """:meth:`Tokenizer.spans` of tokens that cut the UTF-8 bytes of ``text`` into pieces of ``sizes`` bytes."""
    code_N = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    bytes_N = 1 + (code_N >= 0x80).astype(np.int64) + (code_N >= 0x800) + (code_N >= 0x10000)
    character_of_byte = np.repeat(np.arange(len(text)), bytes_N)
    size_N = np.array(sizes, dtype=np.int64)
    end_N = np.cumsum(size_N)
    return np.stack([character_of_byte[end_N - size_N], character_of_byte[end_N - 1] + 1], axis=1)


def valid_text(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass
class TrainArgs:
    """Train a SentencePiece vocabulary from a corpus."""

    input: str = "???"  # the corpus: a file or a glob of JSONL or plain text, any fsspec path
    out: str = "???"  # the .model file to write
    text: str = "text"  # the JSONL column that holds the text
    vocab_size: int = 2048  # ids, special tokens included
    kind: str = "unigram"  # unigram | bpe
    sample_sentences: int = 50_000  # train on this many sentences, chosen by a hash of their place; 0: all
    character_coverage: float = 0.9995  # share of all characters that get a piece; the rest becomes <unk>
    byte_fallback: bool = False  # spell the rest in 256 byte pieces instead
    seed: int = 0  # of the sample

    def __post_init__(self) -> None:
        if self.kind not in ("unigram", "bpe"):
            raise UserError(f"kind={self.kind}: expected unigram or bpe")
        if self.sample_sentences < 0:
            raise UserError(f"sample_sentences={self.sample_sentences}: expected 0 (all) or more")
        if not 0 < self.character_coverage <= 1:
            raise UserError(f"character_coverage={self.character_coverage}: expected above 0 and at most 1")


def train(args: TrainArgs) -> None:
    """Train a SentencePiece vocabulary and write it to ``args.out``: the same bytes for the same input.

    Raises UserError if the input cannot be read or does not fit the vocabulary size.
    """
    import sentencepiece

    begun = time.monotonic()
    files = list_files(args.input)
    megabytes = sum(file.size for file in files) / 1e6
    print(f"{args.input}: reading {len(files)} files of {megabytes:,.1f} MB in all", flush=True)
    sentences = _sample(args)
    if not sentences:
        raise UserError(f"{args.input}: no text to train a vocabulary on")
    print(f"training a {args.kind} vocabulary of {args.vocab_size:,} on {len(sentences):,} sentences", flush=True)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),  # an iterator, so that no path gets into the model's bytes
            model_writer=model,
            model_type=args.kind,
            vocab_size=args.vocab_size,
            character_coverage=args.character_coverage,
            byte_fallback=args.byte_fallback,
            max_sentence_length=2 * MAX_SENTENCE_BYTES,
            bos_id=0, pad_id=1, eos_id=2, unk_id=3,
            bos_piece="<s>", pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>",
            control_symbols=["<mask>"],
            num_threads=1,
            minloglevel=2,
        )  # fmt: skip
    except Exception as error:  # the binding raises plain RuntimeError and OSError
        raise UserError(f"vocab_size={args.vocab_size} on {len(sentences)} sentences: {error}") from None
    out = Path(args.out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, model.getvalue())
    except OSError as error:
        raise UserError(f"out={out}: cannot write: {error}") from None
    tokenizer = SentencePieceTokenizer(args.out)
    seconds = time.monotonic() - begun
    print(f"{args.out}: {tokenizer.vocab_size:,} pieces from {len(sentences):,} sentences, {seconds:.0f} s")


MAX_SENTENCE_BYTES = 4096


def _sample(args: TrainArgs) -> list[str]:
    """``sample_sentences`` sentences, uniformly over the corpus, in corpus order."""
    smallest: list[tuple[int, int, str]] = []  # heap of (-hash, place, sentence): the largest hash on top
    place = 0
    with Progress(args.input, None, "sentences") as progress:
        for document in documents(ReaderArgs(path=args.input, text=args.text)):
            for sentence in _sentences(document.text):
                entry = (-counter_hash(args.seed, place), place, sentence)
                if not args.sample_sentences or len(smallest) < args.sample_sentences:
                    heapq.heappush(smallest, entry)
                elif entry > smallest[0]:
                    heapq.heapreplace(smallest, entry)
                place += 1
                progress.advance(0, 1)
    return [sentence for _, _, sentence in sorted(smallest, key=lambda entry: entry[1])]


def _sentences(text: str) -> Iterator[str]:
    """Pieces of ``text`` that end at a sentence or line end, no longer than SentencePiece reads whole."""
    for sentence in re.split(r"(?<=[.!?])\s+|\s*\n\s*", valid_text(text)):
        # a character has at most 4 bytes
        for start in range(0, len(sentence), MAX_SENTENCE_BYTES // 4):
            piece = sentence[start : start + MAX_SENTENCE_BYTES // 4].replace("\0", " ").strip()
            if piece:
                yield piece


if __name__ == "__main__":
    if sys.argv[1:2] != ["train"]:
        print("usage: python -m lingua.tokenizer train input=GLOB out=FILE.model [--help]", file=sys.stderr)
        raise SystemExit(2)
    cli(TrainArgs, train, "python -m lingua.tokenizer train", sys.argv[2:])
