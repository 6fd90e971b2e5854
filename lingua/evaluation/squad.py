"""Extractive question answering in SQuAD's layout (Rajpurkar et al. 2016, 2018): reader and the official scores."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lingua.errors import UserError

MOST_MISPLACED = 0.01  # share of training questions whose answer may stand elsewhere than the file says


@dataclass(frozen=True)
class Question:
    """One question on one paragraph; no answers: the paragraph has none (2.0 only)."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]  # first character of each answer in the context

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where answers stand in the context, one past the last character, as far as the file is right about it."""
        spans = [(start, start + len(text)) for text, start in zip(self.answers, self.starts, strict=True)]
        return [
            span for text, span in zip(self.answers, spans, strict=True) if text and self.context[slice(*span)] == text
        ]


@dataclass
class Squad:
    """The questions of one file."""

    path: str
    questions: list[Question]
    unanswerable: bool  # whether some have no answer, so that the scores are those of 2.0
    misplaced: list[str] = field(default_factory=list)  # ids whose answers do not stand where the file says


def read_squad(path: str) -> Squad:
    """Read ``{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [...]}]}]}]}``; an answer
    is ``{"text", "answer_start"}``.

    A question without answers needs ``"is_impossible": true``, as in 2.0. Starts count Unicode characters.

    Raises:
        UserError: no such file, no JSON, another layout (with the place in it), the same id twice, no question.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; expected SQuAD's JSON")
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); expected SQuAD's layout") from None
    found = Squad(path, [], False)
    known: set[str] = set()
    for a, article in enumerate(_of(content, "data", list, path, "the top")):
        for p, paragraph in enumerate(_of(article, "paragraphs", list, path, f"data[{a}]")):
            where = f"data[{a}].paragraphs[{p}]"
            context = _of(paragraph, "context", str, path, where)
            for q, entry in enumerate(_of(paragraph, "qas", list, path, where)):
                question = _question(entry, context, path, f"{where}.qas[{q}]")
                if question.id in known:
                    raise UserError(f"{path}: {where}.qas[{q}]: the id {question.id!r} stands twice")
                known.add(question.id)
                found.questions.append(question)
                found.unanswerable |= not question.answers
                if question.answers and not question.places:
                    found.misplaced.append(question.id)
    if not found.questions:
        raise UserError(f"{path}: no questions")
    return found


def _question(entry: Any, context: str, path: str, where: str) -> Question:
    answers = _of(entry, "answers", list, path, where)
    texts = tuple(_of(answer, "text", str, path, f"{where}.answers") for answer in answers)
    starts = tuple(_of(answer, "answer_start", int, path, f"{where}.answers") for answer in answers)
    if entry.get("is_impossible"):
        texts, starts = (), ()
    elif not texts:
        raise UserError(f'{path}: {where}: no answers; one without needs "is_impossible": true, as in SQuAD 2.0')
    names = {name: _of(entry, name, str, path, where) for name in ("id", "question")}
    for name, text in ("question", names["question"]), ("context", context):
        if not text.strip():
            raise UserError(f"{path}: {where}: the {name} is empty")
    return Question(names["id"], names["question"], context, texts, starts)


def _of(entry: Any, key: str, kind: type, path: str, where: str) -> Any:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        raise UserError(f"{path}: {where}: expected {key!r} with a {kind.__name__}, found {str(value)[:80]!r}")
    return value


def check_places(squad: Squad) -> None:
    """Raise UserError if too many answers do not stand where a file of training questions says."""
    if len(squad.misplaced) > MOST_MISPLACED * len(squad.questions):
        raise UserError(
            f"{squad.path}: {len(squad.misplaced)} of {len(squad.questions)} questions have no answer where "
            f"answer_start says, the first is {squad.misplaced[0]!r}: starts count characters, not bytes"
        )


# --- the official scores -------------------------------------------------------------------------------------


def normalize(answer: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an and the, and more than single spaces."""
    text = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact(gold: str, guess: str) -> float:
    """1.0 for equal answers after :func:`normalize`."""
    return float(normalize(gold) == normalize(guess))


def f1(gold: str, guess: str, unanswerable: bool) -> float:
    """F1 of the bags of words. Where one of the answers has no words, 2.0 asks whether both have none; 1.1 says 0."""
    gold_words, words = normalize(gold).split(), normalize(guess).split()
    if unanswerable and not (gold_words and words):
        return float(gold_words == words)
    common = sum((Counter(gold_words) & Counter(words)).values())
    return 2 * common / (len(gold_words) + len(words)) if common else 0.0


def question_scores(squad: Squad, guesses: Mapping[str, str]) -> np.ndarray:
    """(exact, F1) [N, 2] of each question: the best over its answers. No answer is the empty one."""
    scores = np.zeros((len(squad.questions), 2))
    for row, question in enumerate(squad.questions):
        gold: Sequence[str] = question.answers
        if squad.unanswerable:  # the official script of 2.0 leaves out answers without words
            gold = [text for text in gold if normalize(text)] or [""]
        guess = guesses[question.id]
        scores[row] = [max(score) for score in zip(*((exact(g, guess), f1(g, guess, squad.unanswerable)) for g in gold),
                                                   strict=True)]  # fmt: skip
    return scores


def squad_scores(squad: Squad, guesses: Mapping[str, str]) -> dict[str, float]:
    """``f1`` and ``exact`` over all questions; where some have no answer, also over those with and those without."""
    scores_N2 = question_scores(squad, guesses)
    has_answer_N = np.array([bool(question.answers) for question in squad.questions])
    groups = {"": np.ones_like(has_answer_N)}
    if squad.unanswerable:
        groups |= {"_answerable": has_answer_N, "_unanswerable": ~has_answer_N}
    means = {suffix: scores_N2[rows].mean(0).tolist() for suffix, rows in groups.items() if rows.any()}
    return {f"{name}{suffix}": mean[i] for suffix, mean in means.items() for name, i in (("f1", 1), ("exact", 0))}


def best_threshold(squad: Squad, guesses: Mapping[str, str], differences: Mapping[str, float]) -> float:
    """The threshold at which the mean F1 is highest, as the official script of 2.0 finds it.

    Args:
        guesses: answers as if every question had one.
        differences: score of no answer above that of the answer; above the threshold, the answer is withheld.
    """
    answered_N = question_scores(squad, guesses)[:, 1]
    withheld_N = question_scores(squad, dict.fromkeys(guesses, ""))[:, 1]
    difference_N = np.array([differences[question.id] for question in squad.questions])
    order = np.argsort(difference_N, kind="stable")
    values, last = np.unique(difference_N[order], return_index=True)
    gain_N = np.cumsum((answered_N - withheld_N)[order])  # of answering the first ones
    ends = np.append(last[1:], len(order)) - 1  # equal differences are answered together
    totals = np.concatenate([[0.0], gain_N[ends]])
    best = int(totals.argmax())
    return float(values[best - 1]) if best else float(values[0]) - 1.0
