"""Spans and their F1 against seqeval, and by hand."""

from __future__ import annotations

import pytest
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from lingua.evaluation.spans import is_span_tags, span_scores, spans_of
from lingua.hashing import counter_hash

TAGS = ["O", *(f"{prefix}-{name}" for prefix in "BIES" for name in ("PER", "LOC-X"))]


def drawn(seed: int, count: int = 300) -> list[list[str]]:
    """Tag sequences without any order in them: most are not well formed."""
    return [
        [TAGS[counter_hash(seed, i, j) % len(TAGS)] for j in range(1 + counter_hash(seed, i) % 9)] for i in range(count)
    ]


def test_spans_are_those_of_seqeval() -> None:
    for tags in drawn(0, 2000):
        assert spans_of(tags) == get_entities(tags), tags


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_scores_are_those_of_seqeval() -> None:
    target = drawn(1)
    some = [[tag if counter_hash(2, i, j) % 3 else "O" for j, tag in enumerate(tags)] for i, tags in enumerate(target)]
    nothing = [["O"] * len(tags) for tags in target]
    for guess in (some, target, nothing):
        scores = span_scores(target, guess)
        wanted = [f(target, guess) for f in (f1_score, precision_score, recall_score)]
        assert list(scores.values()) == pytest.approx(wanted, abs=1e-12)
    assert 0.2 < span_scores(target, some)["span_f1"] < 0.9


def test_by_hand() -> None:
    target = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    guess = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "I-LOC"]]  # one of three right; a wrong type; wrong ends
    assert span_scores(target, guess) == {"span_f1": 1 / 3, "span_precision": 1 / 3, "span_recall": 1 / 3}
    # A sentence's span does not go on in the next one.
    assert span_scores([["B-A"], ["I-A"]], [["B-A"], ["I-A"]])["span_f1"] == 1.0
    assert len(spans_of(["B-A", "I-A"])) == 1
    assert spans_of(["B-A", "I-B", "I-B"]) == [("A", 0, 0), ("B", 1, 2)]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["O", "B-X", "I-X"], True),
        (["S-X", "O"], True),
        (["O", "I-X"], False),  # IOB1: where spans begin is not said
        (["NOUN", "VERB", "O"], False),
        (["B-", "O"], False),
        (["O"], False),
    ],
)
def test_which_tags_name_spans(tags: list[str], expected: bool) -> None:
    assert is_span_tags(tags) is expected
