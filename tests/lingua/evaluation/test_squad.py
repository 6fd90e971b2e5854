"""SQuAD's scores by hand, as the official scripts define them, and what of a file is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingua.errors import UserError
from lingua.evaluation.squad import (
    Question,
    Squad,
    best_threshold,
    check_places,
    exact,
    f1,
    normalize,
    question_scores,
    read_squad,
    squad_scores,
)
from lingua.hashing import counter_hash

CONTEXT = "Zoë was born in 1999 in the Old Town, near a river."


def entry(id: str = "a", answers: list[tuple[str, int]] | None = None, **more: Any) -> dict[str, Any]:
    answers = [("1999", 16)] if answers is None else answers
    found = {"id": id, "question": "When?", "answers": [{"text": text, "answer_start": at} for text, at in answers]}
    return found | more


def write(path: Path, *qas: Any, context: Any = CONTEXT) -> str:
    path.write_text(json.dumps({"version": "x", "data": [{"paragraphs": [{"context": context, "qas": list(qas)}]}]}))
    return str(path)


def question(id: str, *answers: str) -> Question:
    return Question(id, "q", "c", answers, (0,) * len(answers))


def test_normalization() -> None:
    assert normalize("The  Cat's\tA-B, an (Apple)!") == "cats ab apple"
    assert normalize("theatre Another") == "theatre another"  # articles are whole words
    assert normalize("a.the") == "athe"  # punctuation goes before articles
    assert normalize("Ὀ «quoted»—dash") == "ὀ «quoted»—dash"  # ASCII punctuation only
    assert normalize("the. A, an!") == ""


@pytest.mark.parametrize(
    ("gold", "guess", "is_exact", "value"),
    [
        ("the Old Town", "old town!", 1.0, 1.0),
        ("the Old Town", "town", 0.0, 2 * 1 * 0.5 / 1.5),
        ("a b b c", "b b b", 0.0, 2 * (2 / 3) * (2 / 3) / (4 / 3)),  # of bags: b b c against b b b, two in common
        ("1,000", "1000", 1.0, 1.0),
        ("in 1999", "2000", 0.0, 0.0),
        ("x", "", 0.0, 0.0),
    ],
)
def test_scores_of_one_answer(gold: str, guess: str, is_exact: float, value: float) -> None:
    for unanswerable in (False, True):
        assert exact(gold, guess) == is_exact
        assert f1(gold, guess, unanswerable) == pytest.approx(value, abs=1e-12)


def test_answers_without_words_differ_between_the_scripts() -> None:
    assert f1("the", "a", unanswerable=False) == 0.0  # 1.1: no word in common
    assert f1("the", "a", unanswerable=True) == 1.0  # 2.0: neither has words
    assert exact("the", "a") == 1.0


def test_means_over_questions_of_1_1() -> None:
    squad = Squad("f", [question("a", "the Old Town", "Old Town near a river"), question("b", "1999")], False)
    scores = squad_scores(squad, {"a": "old town near", "b": "in 1999"})
    # a: F1 0.8 against "old town" and 6/7 against "old town near river"; the best counts. b: 2/3.
    assert scores == {"f1": pytest.approx((6 / 7 + 2 / 3) / 2), "exact": 0.0}


def test_means_over_questions_of_2_0() -> None:
    squad = Squad("f", [question("a", "1999"), question("b"), question("c"), question("d", "the")], True)
    scores = squad_scores(squad, {"a": "in 1999", "b": "", "c": "river", "d": ""})
    assert scores == {
        "f1": pytest.approx((2 / 3 + 1 + 0 + 1) / 4),  # d: of "the" nothing is left, so no answer is right
        "exact": 0.5,
        "f1_answerable": pytest.approx((2 / 3 + 1) / 2),
        "exact_answerable": 0.5,
        "f1_unanswerable": 0.5,
        "exact_unanswerable": 0.5,
    }


def test_the_threshold_is_the_best_of_all() -> None:
    words = ["old", "town", "river", ""]
    for seed in range(200):
        draw = [[counter_hash(seed, i, j) for j in range(5)] for i in range(5)]
        questions = [question(str(i), *(["old town"] if a % 2 else [])) for i, (a, *_) in enumerate(draw)]
        squad = Squad("f", questions, True)
        guesses = {str(i): f"{words[b % 4]} {words[c % 4]}".strip() for i, (_, b, c, *_) in enumerate(draw)}
        differences = {str(i): float(d % 4) for i, (*_, d, _) in enumerate(draw)}

        def score(threshold: float, squad: Squad = squad, guesses: Any = guesses, of: Any = differences) -> float:
            return squad_scores(squad, {k: v if of[k] <= threshold else "" for k, v in guesses.items()})["f1"]

        best = max(map(score, [-9.0, *differences.values()]))
        assert score(best_threshold(squad, guesses, differences)) == pytest.approx(best, abs=1e-12)


def test_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        entry("a", [("1999", 16), ("in 1999", 13)]),
        entry("b", [], is_impossible=True, plausible_answers=[{"text": "river", "answer_start": 45}]),
        entry("c", [("1999", 17)]),
    )
    squad = read_squad(path)
    assert [question.id for question in squad.questions] == ["a", "b", "c"]
    assert squad.unanswerable
    assert squad.misplaced == ["c"]
    assert squad.questions[0].places == [(16, 20), (13, 20)]
    assert squad.questions[1].answers == ()
    assert question_scores(squad, {"a": "1999", "b": "", "c": "1999"}).tolist() == np.ones((3, 2)).tolist()
    with pytest.raises(UserError, match="1 of 3 questions have no answer where answer_start says, the first is 'c'"):
        check_places(squad)
    assert not read_squad(write(tmp_path / "b.json", entry())).unanswerable


@pytest.mark.parametrize(
    ("qas", "context", "message"),
    [
        ([entry("a", [])], CONTEXT, r"data\[0\].paragraphs\[0\].qas\[0\]: no answers; one without needs"),
        ([entry("a"), entry("a")], CONTEXT, r"qas\[1\]: the id 'a' stands twice"),
        ([entry(answers=[("x", "16")])], CONTEXT, r"qas\[0\].answers: expected 'answer_start' with a int, found '16'"),
        ([entry(question=None)], CONTEXT, "expected 'question' with a str"),
        ([entry(question=" ")], CONTEXT, "the question is empty"),
        ([entry()], None, "expected 'context' with a str, found 'None'"),
        ([], CONTEXT, "no questions"),
        ([3], CONTEXT, "expected 'answers' with a list"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, qas: list[Any], context: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{tmp_path}/a.json: .*{message}"):
        read_squad(write(tmp_path / "a.json", *qas, context=context))


@pytest.mark.parametrize(("content", "message"), [(b"{", "not JSON"), (b"[]", "expected 'data' with a list"),
                                                   (b"\xff\xfe", "not JSON"), (b"", "not JSON")])  # fmt: skip
def test_a_file_of_another_kind(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_squad(str(tmp_path / "a.json"))
    with pytest.raises(UserError, match="no such file; expected SQuAD's JSON"):
        read_squad(str(tmp_path / "b.json"))


def test_every_pair_of_a_few_words_is_symmetric() -> None:
    words = ["the", "cat", "cats", "the cat", ""]
    for a, b in itertools.product(words, words):
        assert f1(a, b, True) == f1(b, a, True)
        assert exact(a, b) == exact(b, a)
