"""Tasks as rows of tokens and targets, and what is made of a model's outputs: scores and predictions.

A task has the parts ``train``, ``dev`` and ``test`` (the evaluation rows), MNLI also ``mismatched``.
"""

from __future__ import annotations

import abc
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apps.finetune.args import QA, SPAN_F1, FinetuneArgs, FinetuneTaskArgs, task_args
from apps.finetune.model import Rows
from lingua.errors import UserError
from lingua.evaluation.glue import load_glue
from lingua.evaluation.probe import majority
from lingua.evaluation.samples import held_out
from lingua.evaluation.scores import all_metrics
from lingua.evaluation.spans import is_span_tags, span_scores
from lingua.evaluation.tasks import Split, Task, load_split, load_task
from lingua.frozen import FrozenEncoder, Sequences

SPLIT_SEED = 0  # of the rows held out, the same for all seeds of a grid, whose dev scores are compared
Scores = dict[str, float]


class Data(abc.ABC):
    """A task, as a model sees it.

    Attributes:
        kind: classification | regression | tokens | qa.
        metrics: what is shown; the first is the primary one.
        outputs: numbers that the head gives.
        parts: rows by part.
        chosen_on: what the dev rows are.
        baselines: scores on the evaluation rows of what knows no text; ``majority`` always says the same.
        facts: what the result records about files and rows.
    """

    kind: str
    metrics: tuple[str, ...]
    outputs: int
    parts: dict[str, Rows]
    chosen_on: str
    baselines: dict[str, Scores]
    facts: dict[str, Any]

    @abc.abstractmethod
    def score(self, part: str, outputs: list[np.ndarray], dev: Scores | None) -> Scores:
        """Every metric of a part.

        Args:
            outputs: of :meth:`FinetuneModel.outputs`.
            dev: scores of the dev rows, which may hold what was chosen there; None for the dev rows themselves.
        """

    @abc.abstractmethod
    def predictions(self, outputs: list[np.ndarray], dev: Scores) -> Any:
        """What is predicted for the evaluation rows, to be written as JSON."""


def load_data(args: FinetuneArgs, encoder: FrozenEncoder) -> Data:
    """Read, divide and tokenize the task. Raises UserError for what its readers and the tokenizer refuse."""
    own = task_args(args)
    if own is not None and own.kind == QA:
        from apps.finetune.qa import load_qa

        return load_qa(own, args, encoder)
    task = load_glue(args.task, args.glue) if own is None else load_task(args.task, own)
    splits = {"train": task.train, "test": task.test}
    if own is not None and own.dev is not None:
        splits["dev"], chosen_on = _numbered(load_split(own.dev, own, -1), task), "the dev rows"
    elif args.dev_share:
        classes = task.train.y if task.classes else None
        held = held_out(task.train.groups, args.dev_share, SPLIT_SEED, classes)
        splits |= {"train": take(task.train, ~held), "dev": take(task.train, held)}
        chosen_on = f"held-out training rows ({args.dev_share:g})"
    else:
        splits["dev"], chosen_on = task.test, "the evaluation rows"
    if args.task == "mnli" and own is None:
        splits["mismatched"] = load_glue("mnli_mm", args.glue).test
    make = TokenData if task.kind == "tokens" else TextData
    data = make(task, splits, own, encoder)
    data.chosen_on = chosen_on
    data.facts = {
        part: {"files": split.files, "rows": len(split.labels), "truncated": data.parts[part].sequences.truncated}
        for part, split in splits.items()
    } | {"lines_left_out": task.left_out, "labels_never_trained": never_trained(splits)}
    for part, labels in data.facts["labels_never_trained"].items():
        told = ", ".join(f"{label!r} ({count})" for label, count in list(labels.items())[:5])
        more = f" and {len(labels) - 5} others" if len(labels) > 5 else ""
        print(f"{part} rows have labels that no training row has, which count as wrong: {told}{more}", flush=True)
    return data


def never_trained(splits: dict[str, Split]) -> dict[str, dict[str, int]]:
    """By part, the classes that no training row has, and how many of its rows do; only parts that have some."""
    known = set(splits["train"].labels)
    if any(isinstance(label, float) for label in known):
        return {}
    found = {
        part: dict(Counter(label for label in split.labels if label not in known).most_common())
        for part, split in splits.items()
    }
    return {part: labels for part, labels in found.items() if labels}


def take(split: Split, chosen: np.ndarray) -> Split:
    """Some texts or sentences of a split; ``chosen`` is a mask over its labels that keeps groups whole."""
    _, first = np.unique(split.groups, return_index=True)

    def some(items: Any) -> Any:
        return [item for item, keep in zip(items, chosen[first], strict=True) if keep]

    return replace(
        split,
        texts=some(split.texts) if split.texts else [],
        pairs=None if split.pairs is None else some(split.pairs),
        sentences=some(split.sentences) if split.sentences else [],
        labels=[label for label, keep in zip(split.labels, chosen, strict=True) if keep],
        y=split.y[chosen],
    )


def _numbered(split: Split, task: Task) -> Split:
    unknown = sorted(set(split.labels) - set(task.classes)) if task.classes else []
    if unknown:
        raise UserError(
            f"{', '.join(split.files)}: the label {unknown[0]!r} is neither in the training nor in the evaluation rows"
        )
    y = [task.classes.index(label) for label in split.labels] if task.classes else split.labels
    split.y = np.array(y, dtype=np.int64 if task.classes else np.float64)
    return split


@contextlib.contextmanager
def _about(split: Split) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{', '.join(split.files)}, of the rows used: {error}") from None


class TextData(Data):
    """A class or a number for each text or pair."""

    def __init__(
        self, task: Task, splits: dict[str, Split], own: FinetuneTaskArgs | None, encoder: FrozenEncoder
    ) -> None:
        self.kind, self.classes, self.splits = task.kind, task.classes, splits
        self.metric_kind = "regression" if not task.classes else "binary" if len(task.classes) == 2 else self.kind
        self.metrics = task.metrics
        self.outputs = len(task.classes) or 1
        # Targets of regression are standardized for training.
        y = splits["train"].y
        self.center, self.spread = (0.0, 1.0) if task.classes else (float(y.mean()), float(y.std()) or 1.0)
        self.parts = {part: self._rows(split, encoder) for part, split in splits.items()}
        self.baselines = {"majority": majority(y, splits["test"].y)}
        if "mismatched" in splits:
            of_part = majority(y, splits["mismatched"].y)
            self.baselines["majority"] |= {f"mismatched_{name}": value for name, value in of_part.items()}

    def _rows(self, split: Split, encoder: FrozenEncoder) -> Rows:
        with _about(split):
            sequences = encoder.text_sequences(split.texts, split.pairs)
        y = split.y if self.classes else ((split.y - self.center) / self.spread).astype(np.float32)
        return Rows(sequences, [y[i : i + 1] for i in range(len(y))])

    def _predicted(self, outputs: list[np.ndarray]) -> np.ndarray:
        out_NC = np.concatenate(outputs)
        return out_NC.argmax(1) if self.classes else out_NC[:, 0].astype(np.float64) * self.spread + self.center

    def score(self, part: str, outputs: list[np.ndarray], dev: Scores | None) -> Scores:
        return all_metrics(self.splits[part].y, self._predicted(outputs), self.metric_kind)

    def predictions(self, outputs: list[np.ndarray], dev: Scores) -> Any:
        predicted = self._predicted(outputs).tolist()
        return [self.classes[number] for number in predicted] if self.classes else predicted


class TokenData(Data):
    """A class for each word. A sentence that is too long for the encoder goes on in further sequences."""

    kind = "tokens"

    def __init__(
        self, task: Task, splits: dict[str, Split], own: FinetuneTaskArgs | None, encoder: FrozenEncoder
    ) -> None:
        self.classes, self.splits = task.classes, splits
        asked = own.metric if own else None
        # Without any B-X it is not said that they are spans, unless the task says so; I-X begins one then.
        self.has_spans = is_span_tags([*task.classes, "B-X"] if asked == SPAN_F1 else task.classes)
        self.outputs = len(task.classes)
        if asked == SPAN_F1 and not self.has_spans:
            raise UserError(
                f"tasks.{task.name}.metric={SPAN_F1}: expected tags B-X, I-X and O, found {', '.join(task.classes[:9])}"
            )
        usual = (SPAN_F1, "accuracy") if self.has_spans else ("accuracy", "macro_f1")
        self.metrics = tuple(dict.fromkeys((asked or usual[0], *usual)))
        self.parts = {part: self._rows(split, encoder) for part, split in splits.items()}
        train, test = splits["train"], splits["test"]
        commonest = np.bincount(train.y).argmax()
        of_word = commonest_tag(train)
        by_word = [of_word.get(word, commonest) for words in test.sentences for word in words]
        self.baselines = {
            "majority": self._scores(test, np.full(len(test.y), commonest)),
            "commonest tag of each word": self._scores(test, np.array(by_word)),
        }

    def _rows(self, split: Split, encoder: FrozenEncoder) -> Rows:
        with _about(split):
            sequences = whole_sentences(encoder, split.sentences)
        ends = np.cumsum([len(places) for places in sequences.places or ()])
        return Rows(sequences, np.split(split.y, ends[:-1]))

    def _sentences(self, split: Split, y: np.ndarray) -> list[list[str]]:
        tags = iter(y)
        return [[self.classes[next(tags)] for _ in words] for words in split.sentences]

    def _scores(self, split: Split, y: np.ndarray) -> Scores:
        spans = span_scores(self._sentences(split, split.y), self._sentences(split, y)) if self.has_spans else {}
        return spans | all_metrics(split.y, y, "classification")

    def score(self, part: str, outputs: list[np.ndarray], dev: Scores | None) -> Scores:
        return self._scores(self.splits[part], np.concatenate(outputs).argmax(1))

    def predictions(self, outputs: list[np.ndarray], dev: Scores) -> Any:
        return self._sentences(self.splits["test"], np.concatenate(outputs).argmax(1))


def commonest_tag(split: Split) -> dict[str, int]:
    """The class that each word of a split has most often; of equals the lower."""
    counts: dict[str, Counter[int]] = {}
    words = (word for words in split.sentences for word in words)
    for word, tag in zip(words, split.y.tolist(), strict=True):
        counts.setdefault(word, Counter())[tag] += 1
    return {word: min(count, key=lambda tag: (-count[tag], tag)) for word, count in counts.items()}


def whole_sentences(encoder: FrozenEncoder, sentences: Sequence[Sequence[str]]) -> Sequences:
    """Sequences in which every word has a place: what of a sentence is beyond ``max_length`` follows as another
    sequence. ``truncated`` counts the sentences cut."""
    found: list[tuple[int, np.ndarray, np.ndarray | None, np.ndarray]] = []
    left = list(enumerate(sentences))
    cut = 0
    while left:
        part = encoder.word_sequences([words for _, words in left])
        types = part.types or [None] * len(left)
        rest = []
        for (owner, words), *row in zip(left, part.ids, types, part.places, strict=True):
            found.append((owner, *row))
            if len(row[-1]) < len(words):
                rest.append((owner, words[len(row[-1]) :]))
        cut = cut or len(rest)
        left = rest
    found.sort(key=lambda row: row[0])  # stable: the parts of a sentence stay in their order
    types = None if found[0][2] is None else [row[2] for row in found]
    return Sequences([row[1] for row in found], types, [row[3] for row in found], truncated=cut)
