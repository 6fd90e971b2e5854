"""Named spans in tags (B-X, I-X, also E-X and S-X, and O), and their F1, equal to seqeval's and conlleval's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PREFIXES = ("B-", "I-", "E-", "S-")
Span = tuple[str, int, int]  # type, first word, last word


def is_span_tags(tags: Iterable[str]) -> bool:
    """Whether all tags are O or of the form B-X, I-X, E-X, S-X, and some of them begin a span."""
    found = set(tags)
    named = all(tag == "O" or (tag.startswith(PREFIXES) and len(tag) > 2) for tag in found)
    return named and any(tag.startswith(("B-", "S-")) for tag in found)


def spans_of(tags: Sequence[str]) -> list[Span]:
    """The spans of one sentence.

    As conlleval reads them, also where the tags are not well formed: an I- after O or after another type begins a span.
    """
    found: list[Span] = []
    begin, last, last_type = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        kind, _, name = tag.partition("-")
        continues = kind in ("I", "E") and last in ("B", "I") and name == last_type
        if last != "O" and not continues:
            found.append((last_type, begin, place - 1))
        if kind != "O" and not continues:
            begin = place
        last, last_type = kind, name
    return found


def span_scores(targets: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> dict[str, float]:
    """``span_f1``, ``span_precision`` and ``span_recall`` over the spans of all sentences (micro averages).

    A span counts if type, first and last word are right. What has no denominator is 0.
    """
    right = wanted = given = 0
    for target, guess in zip(targets, predicted, strict=True):
        in_target, in_guess = set(spans_of(target)), set(spans_of(guess))
        right, wanted, given = right + len(in_target & in_guess), wanted + len(in_target), given + len(in_guess)
    return {
        "span_f1": 2 * right / (wanted + given) if wanted + given else 0.0,
        "span_precision": right / given if given else 0.0,
        "span_recall": right / wanted if wanted else 0.0,
    }
