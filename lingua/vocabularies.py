"""Vocabularies from elsewhere: tiktoken files, Hugging Face ``tokenizer.json`` files, and plain bytes.

They rarely have all of ``<s> <pad> </s> <unk> <mask>``. What is missing is appended after the last id, which
changes no id of the text; ``Tokenizer.appended`` and the identity name what was.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingua.errors import UserError
from lingua.files import optional
from lingua.tokenizer import SPECIALS, Tokenizer, byte_spans, valid_text

ROLES = ("bos", "pad", "eos", "unk", "mask")  # of SPECIALS
# What the special tokens are called in vocabularies of the hub, where the files beside them do not say.
KNOWN_NAMES = {
    "bos": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "eos": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
SMALL_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # say what the special tokens are called
# Names for TokenizerArgs.pattern: how text is cut before merging, which a tiktoken file does not hold.
PATTERNS = {
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",  # also Llama 3's
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


class _WithAppended(Tokenizer):
    def _set_specials(self, ids: dict[str, int], size: int) -> None:
        """``ids`` of the roles the vocabulary has; the others get the ids from ``size`` on."""
        self._names: dict[int, str] = {}
        missing = [role for role in ROLES if role not in ids]
        for i, role in enumerate(missing, size):
            ids[role] = i
            self._names[i] = SPECIALS[ROLES.index(role)]
        self.appended = tuple(self._names.values())
        self.vocab_size = size + len(missing)
        for role in ROLES:
            setattr(self, f"{role}_id", ids[role])

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "appended": list(self.appended)}


class BytesTokenizer(_WithAppended):
    """One id a UTF-8 byte, 0 to 255, then ``<s> <pad> </s> <unk> <mask>``."""

    kind = "bytes"

    def __init__(self) -> None:
        self._set_specials({}, 256)
        self.special_ids = tuple(range(256, self.vocab_size))
        self._sha256 = hashlib.sha256(bytes(range(256))).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(valid_text(text).encode(), np.uint8).astype(np.int32) for text in texts]

    def spans(self, text: str) -> np.ndarray:
        return byte_spans(text, [1] * len(text.encode()))

    def decode(self, ids: Iterable[int]) -> str:
        parts = (self._names[i].encode() if i > 255 else bytes([i]) for i in self._check_ids(ids))
        return b"".join(parts).decode("utf-8", "replace")


class TiktokenTokenizer(_WithAppended):
    """A tiktoken file (one base64 token and its rank a line) with a ``pattern`` of :data:`PATTERNS` or of one's own.

    Raises UserError if the file is missing or not one, or the pattern is no regular expression.
    """

    kind = "tiktoken"

    def __init__(self, path: str, pattern: str | None) -> None:
        import tiktoken

        if not Path(path).is_file():
            raise UserError(f"tokenizer.path={path}: no such file")
        raw, self.files = Path(path).read_bytes(), (Path(path),)
        ranks: dict[bytes, int] = {}
        self.ranks = ranks  # of the tokens' bytes, also their ids
        for number, line in enumerate(raw.splitlines(), 1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise UserError(f"tokenizer.path={path}, line {number}: expected a base64 token and its rank") from None
        lost = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if lost or len(set(ranks.values())) != len(ranks):
            reason = f"byte 0x{lost[0]:02x} is no token" if lost else "a rank occurs twice"
            raise UserError(f"tokenizer.path={path}: not a whole vocabulary: {reason}")
        self._bytes = {rank: token for token, rank in ranks.items()}
        size = max(self._bytes) + 1
        self._set_specials({}, size)
        # gaps are ids that no text produces
        self.special_ids = tuple(i for i in range(self.vocab_size) if i not in self._bytes)
        self.pattern = regex = PATTERNS.get(pattern or "cl100k", pattern or "")
        try:
            self._bpe = tiktoken.Encoding("own", pat_str=regex, mergeable_ranks=ranks, special_tokens={})
        except Exception as error:  # the binding raises plain ValueError
            raise UserError(f"tokenizer.pattern={pattern}: not a regular expression: {error}") from None
        self._sha256 = hashlib.sha256(raw + regex.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._bpe.encode_to_numpy(valid_text(text)).astype(np.int32) for text in texts]

    def spans(self, text: str) -> np.ndarray:
        (ids,) = self.encode_batch([text])
        return byte_spans(text, [len(self._bytes[int(i)]) for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        # an id in a gap has no text
        parts = (self._bytes.get(i) or self._names.get(i, "").encode() for i in self._check_ids(ids))
        return b"".join(parts).decode("utf-8", "replace")


class HFTokenizer(_WithAppended):
    """A ``tokenizer.json`` file, a folder with one, or an id on the Hugging Face hub.

    Its normalization applies; its template for special tokens, truncation and padding do not.

    Raises UserError if it cannot be found or read.
    """

    kind = "hf"

    def __init__(self, path: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # worker processes are the parallelism
        tokenizers = optional("tokenizers", "tokenizer.name=hf")
        file, beside = _find(path)
        raw = file.read_bytes()
        try:
            self._library = tokenizers.Tokenizer.from_str(raw.decode())
        except Exception as error:  # the binding raises plain Exception
            raise UserError(f"tokenizer.path={path}: {file} is not a tokenizer.json file: {error}") from None
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True  # "<mask>" in a text is the characters it is
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values()) + 1
        ids = {}
        for role in ROLES:
            names = [name for name in (*_said_names(beside, role), *KNOWN_NAMES[role]) if name in vocabulary]
            if names:
                ids[role] = vocabulary[names[0]]
        self._set_specials(ids, size)
        added = {i for i, token in self._library.get_added_tokens_decoder().items() if token.special}
        gaps = set(range(size)) - set(vocabulary.values())
        self.special_ids = tuple(sorted(added | gaps | {getattr(self, f"{role}_id") for role in ROLES}))
        self._special = frozenset(self.special_ids)
        self._sha256 = hashlib.sha256(raw).hexdigest()
        self.files = (file, *(path for path in beside if path.is_file()))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._library.encode_batch_fast([valid_text(text) for text in texts], add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def spans(self, text: str) -> np.ndarray:
        found = self._library.encode(text, add_special_tokens=False).offsets
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        run: list[int] = []  # decoders join words with spaces, so specials are set between what they decode
        for i in self._check_ids(ids):
            if i in self._special:
                parts += [self._decode_run(run), self._names.get(i) or self._library.id_to_token(i) or ""]
                run = []
            else:
                run.append(i)
        return "".join([*parts, self._decode_run(run)])

    def _decode_run(self, run: list[int]) -> str:
        return self._library.decode(run, skip_special_tokens=False) if run else ""


def _find(path: str) -> tuple[Path, list[Path]]:
    """The tokenizer.json that ``path`` names, and the small files beside it."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if file.is_file():
        return file, [file.with_name(name) for name in SMALL_FILES]
    if Path(path).is_dir() or path.endswith(".json") or path.startswith((".", "/")):
        raise UserError(f"tokenizer.path={path}: no such file: {file}")
    hub = optional("huggingface_hub", f"tokenizer.path={path}")
    try:
        file = Path(hub.hf_hub_download(path, "tokenizer.json"))
    except Exception as error:  # no network, no such repository, no permission: types of several libraries
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"tokenizer.path={path}: no such folder, and the hub does not give it: {reason}; "
            "python setup/download_tokenizer.py fetches one where there is a network"
        ) from None
    beside = []
    for name in SMALL_FILES:
        try:
            beside.append(Path(hub.hf_hub_download(path, name)))
        except Exception:  # a repository need not have them
            continue
    return file, beside


def _said_names(beside: list[Path], role: str) -> list[str]:
    """What the files beside a tokenizer.json call a role; BERT's call the first and the last token cls and sep."""
    keys = [f"{role}_token", *{"bos": ["cls_token"], "eos": ["sep_token"]}.get(role, [])]
    names = []
    for file in beside:
        if file.is_file():
            try:
                said = json.loads(file.read_text())
            except ValueError as error:
                raise UserError(f"{file}: not valid JSON: {error}") from None
            if not isinstance(said, dict):
                raise UserError(f"{file}: expected a JSON object, found {str(said)[:80]}")
            for value in (said.get(key) for key in keys):
                names += [value["content"] if isinstance(value, dict) else value] if value else []
    return names
