"""Extractive question answering: windows over long paragraphs, and the best span of all windows of a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apps.finetune.args import FinetuneArgs, FinetuneTaskArgs, QaArgs
from apps.finetune.data import SPLIT_SEED, Data, Scores
from apps.finetune.model import Rows
from lingua.errors import UserError
from lingua.evaluation.samples import held_out
from lingua.evaluation.squad import Question, Squad, best_threshold, check_places, read_squad, squad_scores
from lingua.evaluation.tables import file_digest
from lingua.features import TextEncoder
from lingua.frozen import FrozenEncoder, Sequences, check_texts
from lingua.hf_encoder import HFEncoder

NO_ANSWER = 0  # the place of <s>, the first of every window


@dataclass
class Window:
    """A question with as much of its paragraph as fits."""

    ids: np.ndarray
    types: np.ndarray | None
    places: np.ndarray  # tokens that an answer may begin or end at: <s>, then those of the paragraph
    spans: np.ndarray  # [places - 1, 2] characters of the paragraph that these stand for, without spaces around them


def windows(encoder: FrozenEncoder, question: str, context: str, args: QaArgs) -> list[Window]:
    """Windows that begin ``args.stride`` tokens apart, the last of which reaches the paragraph's end.

    Raises:
        UserError: a text that is none, or an encoder whose length has no room for a paragraph.
    """
    check_texts([question, context])
    make = _hf_windows if isinstance(encoder, HFEncoder) else _own_windows
    return make(encoder, question, context, args)


def _own_windows(encoder: TextEncoder, question: str, context: str, args: QaArgs) -> list[Window]:
    tokenizer = encoder.tokenizer
    question_ids, ids = tokenizer.encode_batch([question, context])
    spans = trimmed(context, tokenizer.spans(context))
    question_ids = question_ids[: args.max_question]
    bos, eos = [tokenizer.bos_id], [tokenizer.eos_id]
    before = np.concatenate([bos, question_ids, eos, eos]).astype(np.int64)
    room = _room(encoder.max_length - len(before) - 1, encoder)
    found = []
    for start in range(0, max(1, len(ids)), min(args.stride, room)):
        part = ids[start : start + room]
        places = np.concatenate([[0], len(before) + np.arange(len(part))])
        found.append(Window(np.concatenate([before, part, eos]), None, places, spans[start : start + room]))
        if start + room >= len(ids):
            break
    return found


def _hf_windows(encoder: HFEncoder, question: str, context: str, args: QaArgs) -> list[Window]:
    tokenizer = encoder.tokenizer
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} does not tell where tokens stand: it cannot answer questions")
    of_question = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if len(of_question["input_ids"]) > args.max_question:
        question = question[: of_question["offset_mapping"][args.max_question][0]]
    asked = len(tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
    room = _room(encoder.max_length - asked - tokenizer.num_special_tokens_to_add(pair=True), encoder)
    has_types = "token_type_ids" in tokenizer.model_input_names
    whole = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=encoder.max_length,
        stride=room - min(args.stride, room),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=has_types,
    )
    found = []
    for number, ids in enumerate(whole["input_ids"]):
        of_context = np.array([part == 1 for part in whole.sequence_ids(number)])
        spans = trimmed(context, np.array(whole["offset_mapping"][number], dtype=np.int64)[of_context].reshape(-1, 2))
        types = np.array(whole["token_type_ids"][number], dtype=np.int64) if has_types else None
        places = np.concatenate([[0], np.flatnonzero(of_context)])
        found.append(Window(np.array(ids, dtype=np.int64), types, places, spans))
    return found


def _room(room: int, encoder: FrozenEncoder) -> int:
    if room < 1:
        raise UserError(
            f"max_length={encoder.max_length}: question and special tokens leave no room for a paragraph; raise it or "
            "lower qa.max_question"
        )
    return room


def trimmed(text: str, spans_N2: np.ndarray) -> np.ndarray:
    """Spans without the white space at their ends; of nothing else, empty ones."""
    found = spans_N2.copy()
    for row, (begin, end) in enumerate(spans_N2.tolist()):
        piece = text[begin:end]
        found[row, 0] = min(end, begin + len(piece) - len(piece.lstrip()))
        found[row, 1] = max(found[row, 0], begin + len(piece.rstrip()))
    return found


def target_places(window: Window, answer: tuple[int, int] | None) -> np.ndarray:
    """[2]: the places at which an answer's characters begin and end; those of no answer if it is not all in here."""
    nothing = np.array([NO_ANSWER, NO_ANSWER])
    if answer is None or not len(window.spans):
        return nothing
    begin_N, end_N = window.spans.T
    touching = np.flatnonzero((begin_N < answer[1]) & (end_N > answer[0]) & (begin_N < end_N))
    if not len(touching) or begin_N[touching[0]] > answer[0] or end_N[touching].max() < answer[1]:
        return nothing
    return 1 + touching[[0, -1]]


def best_span(window: Window, scores_P2: np.ndarray, max_answer: int) -> tuple[float, tuple[int, int] | None]:
    """(score, characters) of the best answer in a window of at most ``max_answer`` tokens; None if it has none."""
    usable_N = window.spans[:, 0] < window.spans[:, 1]
    if not usable_N.any():
        return -np.inf, None
    begin_N, end_N = np.where(usable_N[:, None], scores_P2[1:], -np.inf).T
    best: tuple[float, tuple[int, int] | None] = (-np.inf, None)
    for longer in range(min(max_answer, len(begin_N))):  # tokens between begin and end
        score_N = begin_N[: len(begin_N) - longer] + end_N[longer:]
        i = int(score_N.argmax())
        if score_N[i] > best[0]:
            best = (float(score_N[i]), (int(window.spans[i, 0]), int(window.spans[i + longer, 1])))
    return best


class QaData(Data):
    """Questions by part, each with its windows."""

    kind, outputs = "qa", 2

    def __init__(
        self, squads: dict[str, Squad], metric: str, encoder: FrozenEncoder, args: QaArgs, chosen_on: str
    ) -> None:
        self.squads, self.args, self.chosen_on = squads, args, chosen_on
        self.windows: dict[str, list[list[Window]]] = {}
        self.parts = {part: self._rows(part, squad, encoder) for part, squad in squads.items()}
        test = squads["test"]
        self.baselines = {"majority": squad_scores(test, dict.fromkeys((q.id for q in test.questions), ""))}
        self.metrics = (metric, *(name for name in self.baselines["majority"] if name != metric))
        self.facts = {
            part: {
                "files": {squad.path: file_digest(squad.path)},
                "rows": len(squad.questions),
                "windows": sum(map(len, self.windows[part])),
                "answers_not_where_said": squad.misplaced,
                "without_answer": sum(not question.answers for question in squad.questions),
            }
            for part, squad in squads.items()
        }
        self.facts["null_threshold"] = {"from": self._threshold_from()}

    def _threshold_from(self) -> str | None:
        """What says which answers are withheld: ``qa.null_threshold`` or ``dev``; says so if it cannot be told well."""
        if self.args.null_threshold is not None:
            return "qa.null_threshold"
        chosen = self.squads["dev"].unanswerable
        dev, test = (self.facts[part]["without_answer"] for part in ("dev", "test"))
        if test and not dev:
            what = "is chosen on questions that all have answers" if chosen else "can be chosen: all questions get one"
            print(
                f"{test} of the {self.facts['test']['rows']} evaluation questions have no answer, but none of the dev "
                f"questions, so {'the' if chosen else 'no'} no-answer threshold {what}; give dev questions without "
                "answers, or qa.null_threshold",
                flush=True,
            )
        return "dev" if chosen else None

    def _rows(self, part: str, squad: Squad, encoder: FrozenEncoder) -> Rows:
        self.windows[part] = [windows(encoder, q.question, q.context, self.args) for q in squad.questions]
        flat = [window for found in self.windows[part] for window in found]
        answers = [
            (question.places or [None])[0]
            for question, found in zip(squad.questions, self.windows[part], strict=True)
            for _ in found
        ]
        targets = [target_places(window, answer) for window, answer in zip(flat, answers, strict=True)]
        types = None if flat[0].types is None else [window.types for window in flat]
        return Rows(Sequences([w.ids for w in flat], types, [w.places for w in flat]), targets)

    def _guesses(self, part: str, outputs: list[np.ndarray]) -> tuple[dict[str, str], dict[str, float]]:
        """Each question's best answer, and how far no answer scores above it (the least of any window's)."""
        guesses, differences, scores = {}, {}, iter(outputs)
        for question, found in zip(self.squads[part].questions, self.windows[part], strict=True):
            of_windows = [next(scores) for _ in found]
            best, span = max(
                (best_span(w, s, self.args.max_answer) for w, s in zip(found, of_windows, strict=True)),
                key=lambda answer: answer[0],
            )
            nothing = min(float(s[NO_ANSWER].sum()) for s in of_windows)
            guesses[question.id] = "" if span is None else question.context[slice(*span)]
            differences[question.id] = nothing - best if span is not None else np.finfo(np.float32).max.item()
        return guesses, differences

    def _given(self, part: str, outputs: list[np.ndarray], dev: Scores | None) -> tuple[dict[str, str], float | None]:
        """Answers, withheld where the threshold says so, and the threshold, which the dev questions choose."""
        guesses, differences = self._guesses(part, outputs)
        threshold = self.args.null_threshold
        if threshold is None and dev is not None:
            threshold = dev.get("null_threshold")
        elif threshold is None and self.squads[part].unanswerable:
            threshold = best_threshold(self.squads[part], guesses, differences)
        if threshold is None:
            return guesses, None
        return {id: text if differences[id] <= threshold else "" for id, text in guesses.items()}, threshold

    def score(self, part: str, outputs: list[np.ndarray], dev: Scores | None) -> Scores:
        given, threshold = self._given(part, outputs, dev)
        scores = squad_scores(self.squads[part], given)
        return scores if threshold is None else scores | {"null_threshold": threshold}

    def predictions(self, outputs: list[np.ndarray], dev: Scores) -> Any:
        """Answers by question, as SQuAD's own scripts take them."""
        return self._given("test", outputs, dev)[0]


def load_qa(own: FinetuneTaskArgs, args: FinetuneArgs, encoder: FrozenEncoder) -> QaData:
    """Read the files and cut them into windows. Raises UserError as :func:`read_squad` does."""
    train, test = read_squad(own.train), read_squad(own.test)
    check_places(train)
    squads = {"train": train, "test": test}
    if own.dev is not None:
        squads["dev"], chosen_on = read_squad(own.dev), "the dev rows"
    elif args.dev_share:
        _, of_paragraph = np.unique([q.context for q in train.questions], return_inverse=True)
        held = held_out(of_paragraph, args.dev_share, SPLIT_SEED)
        squads |= {"train": _part(train, ~held), "dev": _part(train, held)}
        chosen_on = f"held-out training rows ({args.dev_share:g})"
    else:
        squads["dev"], chosen_on = test, "the evaluation rows"
    squads["train"] = _part(squads["train"], [not q.answers or bool(q.places) for q in squads["train"].questions])
    return QaData(squads, str(own.metric), encoder, args.qa, chosen_on)


def _part(squad: Squad, keep: Sequence[bool] | np.ndarray) -> Squad:
    questions: list[Question] = [q for q, kept in zip(squad.questions, keep, strict=True) if kept]
    return Squad(squad.path, questions, squad.unanswerable, squad.misplaced)
