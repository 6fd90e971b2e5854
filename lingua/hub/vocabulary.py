"""Any tokenizer of :mod:`lingua.tokenizer` as a ``tokenizer.json``, checked text by text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lingua.errors import UserError
from lingua.files import optional
from lingua.tokenizer import RobertaTokenizer, SentencePieceTokenizer, Tokenizer
from lingua.vocabularies import ROLES, BytesTokenizer, HFTokenizer, TiktokenTokenizer

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Both tokenizers must agree on all of these, and on every pair of them joined, before a file is written.
PROBES = (
    "", " ", "  two  spaces ", "\n", "a\nb\r\n\r\nc", "\ttab\t", "Hello, world! It's 3.14 o'clock; we'll see.",
    "UPPER lower CamelCase snake_case kebab-case", "1234567890 12,345 1e-5 0x1F", "don't DON'T I'VE they're",
    "naïve café Ångström Zürich œuvre", "Ελληνικά Русский עברית العربية हिन्दी ไทย", "中文字符 日本語テキスト 한국어",
    "🙂 👩‍👩‍👧 🇫🇷", "e\u0301 n\u0303 \ufb01 ½ ² ™ …", "\u00a0\u2003\u200b\ufeff",
    "\u201cquotes\u201d \u2018and\u2019 \u2014 dashes \u2013 «these»",
    "def f(x):\n    return {'a': [x, *y]}  # comment", "http://example.org/a?b=c&d=%20 me@example.org",
    "!!! ??? ... --- ___ $$$ @@@ ###", "\x00\x01\x1f\x7f", "a" * 50, "antidisestablishmentarianism", "▁ Ġ ##ing <0>",
)  # fmt: skip


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """What the five special tokens are called, by role (``bos``, ``pad``, ``eos``, ``unk``, ``mask``)."""
    return {role: tokenizer.decode([getattr(tokenizer, f"{role}_id")]) for role in ROLES}


def to_library(tokenizer: Tokenizer) -> Any:
    """A ``tokenizers.Tokenizer`` with the same ids.

    It makes ``<s> a </s>`` of a text and ``<s> a </s></s> b </s>`` of a pair. Unlike here, the name of a special token
    in a text is that token.

    Raises:
        UserError: the two differ on some text, or the vocabulary is of a kind that cannot be expressed.
    """
    tokenizers = optional("tokenizers", "export")
    specials = _special_ids(tokenizer)
    if isinstance(tokenizer, RobertaTokenizer):
        ids = dict(zip(tokenizer.token_bytes, range(4, 4 + len(tokenizer.token_bytes)), strict=True))
        library = _byte_level(tokenizers, tokenizer.ranks, ids, specials, GPT2_PATTERN)
    elif isinstance(tokenizer, TiktokenTokenizer):
        library = _byte_level(tokenizers, tokenizer.ranks, tokenizer.ranks, specials, tokenizer.pattern)
    elif isinstance(tokenizer, BytesTokenizer):
        single = {bytes([byte]): byte for byte in range(256)}
        library = _byte_level(tokenizers, single, single, specials, None)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        library = _sentencepiece(tokenizers, tokenizer)
    elif isinstance(tokenizer, HFTokenizer):
        library = tokenizers.Tokenizer.from_file(str(tokenizer.files[0]))
        library.no_truncation()
        library.no_padding()
    else:
        raise UserError(f"a {tokenizer.kind} vocabulary cannot be written as tokenizer.json")
    _check_same(tokenizer, library)  # while there is nothing special in the texts, and no template
    _add_specials(tokenizers, library, tokenizer)
    return library


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of all special tokens by name, ascending; ids in gaps of the vocabulary have no name."""
    return {name: i for i in tokenizer.special_ids if (name := tokenizer.decode([i]))}


def _add_specials(tokenizers: Any, library: Any, tokenizer: Tokenizer) -> None:
    roles, known = special_names(tokenizer), library.get_added_tokens_decoder()
    for name, i in _special_ids(tokenizer).items():
        if i not in known:
            # The mask stands for a token that begins with a space.
            library.add_special_tokens([tokenizers.AddedToken(name, lstrip=name == roles["mask"], normalized=False)])
        if library.token_to_id(name) != i:
            raise UserError(
                f"tokenizer.json cannot give the special token {name} the id {i}: it gets {library.token_to_id(name)}"
            )
    bos, eos = roles["bos"], roles["eos"]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[(bos, tokenizer.bos_id)] + ([(eos, tokenizer.eos_id)] if eos != bos else []),
    )


def _check_same(tokenizer: Tokenizer, library: Any) -> None:
    """Raise UserError at the first text of which the two make different tokens.

    A unigram model may put the same pieces in another order ("99" "9", "9" "99"): both have the same probability, and
    which one wins is a matter of rounding.
    """
    unordered = type(library.model).__name__ == "Unigram"
    texts = [*PROBES, *(f"{a} {b}" for a in PROBES for b in PROBES)]
    theirs = library.encode_batch(texts, add_special_tokens=False)
    for text, ours, other in zip(texts, tokenizer.encode_batch(texts), theirs, strict=True):
        same = sorted(ours.tolist()) == sorted(other.ids) if unordered else ours.tolist() == other.ids
        if not same:
            raise UserError(
                f"this {tokenizer.kind} vocabulary cannot be written as tokenizer.json: {text!r} would become "
                f"{other.tokens} and is {[tokenizer.decode([i]) for i in ours]}"
            )


def _byte_level(
    tokenizers: Any, ranks: dict[bytes, int], ids: dict[bytes, int], specials: dict[str, int], pattern: str | None
) -> Any:
    """Byte-level BPE.

    Args:
        ranks: in which order bytes are merged to tokens.
        ids: of the same tokens.
        specials: ids of the special tokens.
        pattern: how text is cut before merging; None: not at all.
    """
    letters = byte_letters()
    spell = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [merge for token in sorted(ranks, key=ranks.__getitem__) if (merge := merge_of(ranks, token))]
    model = tokenizers.models.BPE(
        vocab={spell[token]: i for token, i in ids.items()} | specials,
        merges=[(spell[a], spell[b]) for a, b in merges],
        ignore_merges=True,  # a piece that is a token is that token, as in tiktoken
    )
    library = tokenizers.Tokenizer(model)
    bytes_only = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = bytes_only
    if pattern is not None:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, bytes_only])
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def byte_letters() -> list[str]:
    """The printable letter by which byte-level vocabularies write each byte (as GPT-2's code does)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letter[byte] for byte in range(256)]


def merge_of(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes] | None:
    """The two tokens whose merge makes ``token``; None for a single byte, or if merging never arrives at it."""
    parts: Sequence[bytes] = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(a + b, ranks[token]) for a, b in itertools.pairwise(parts)]
        place = min(range(len(found)), key=found.__getitem__)
        if found[place] >= ranks[token]:
            return None
        parts = [*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _sentencepiece(tokenizers: Any, tokenizer: SentencePieceTokenizer) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files[0].read_bytes())
    kinds = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if proto.trainer_spec.model_type == kinds.UNIGRAM:
        model = tokenizers.models.Unigram(pieces, unk_id=tokenizer.unk_id, byte_fallback=kinds.byte_fallback)
    elif proto.trainer_spec.model_type == kinds.BPE:
        ids = {piece: i for i, (piece, _) in enumerate(pieces)}
        scored = sorted(
            (-score, ids[piece], piece) for piece, score in pieces if ids[piece] not in tokenizer.special_ids
        )
        cuts = [(piece[:i], piece[i:]) for _, _, piece in scored for i in range(1, len(piece))]
        model = tokenizers.models.BPE(
            vocab=ids,
            merges=[(a, b) for a, b in cuts if a in ids and b in ids],
            unk_token=pieces[tokenizer.unk_id][0],
            fuse_unk=True,
            byte_fallback=kinds.byte_fallback,
        )
    else:
        raise UserError("a SentencePiece vocabulary of words or characters cannot be written as tokenizer.json")
    library, spec = tokenizers.Tokenizer(model), proto.normalizer_spec
    steps = [tokenizers.normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [tokenizers.normalizers.Strip(), tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    library.normalizer = tokenizers.normalizers.Sequence(steps)
    prepend = "always" if spec.add_dummy_prefix else "never"
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend)
    decoders = tokenizers.decoders
    library.decoder = decoders.Metaspace(prepend_scheme=prepend)
    if kinds.byte_fallback:  # bytes become characters once all tokens are joined, so spaces come before
        strip = [decoders.Strip(content=" ", left=1)] if spec.add_dummy_prefix else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        library.decoder = decoders.Sequence(steps)
    return library
