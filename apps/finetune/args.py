"""What a fine-tuning is told: one task, one learning rate, one seed. Grids of them are apps/finetune/grid.py's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lingua.errors import UserError, check_fields
from lingua.evaluation.glue import GLUE, GlueArgs
from lingua.evaluation.tasks import KINDS, TaskArgs
from lingua.optim import OptimArgs
from lingua.pooler import PoolerArgs

QA = "qa"
SPAN_F1 = "span_f1"


@dataclass
class FinetuneTaskArgs(TaskArgs):
    """One labelled data set of your own. What is said of probes holds here for fine-tuning."""

    kind: str = "classification"  # classification | regression | tokens | qa (SQuAD's JSON)
    dev: str | None = None  # file of the rows that stop early and choose; none: a share of the training rows
    # The primary score; none: accuracy; spearman for regression; span_f1 for tokens with tags B-X, I-X and O; f1 for qa
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, QA):
            raise UserError(f"task: kind={self.kind}: expected one of {', '.join((*KINDS, QA))}")
        if self.kind == QA:
            if self.metric not in (None, "f1", "exact"):
                raise UserError(f"task: metric={self.metric}: a qa task has f1, exact")
            self.metric = self.metric or "f1"
            if (self.max_train_rows, self.max_test_rows) != (-1, -1):
                raise UserError("task: max_train_rows and max_test_rows are not for qa: give smaller files")
            return
        if self.kind != "tokens":
            super().__post_init__()
            return
        asked = self.metric
        self.metric = None if asked == SPAN_F1 else asked
        super().__post_init__()
        self.metric = asked  # none: what the tags say, once they are read


@dataclass
class FinetuneOptimArgs(OptimArgs):
    """AdamW as usual for fine-tuning: a tenth of warm-up, then linear to zero."""

    lr: float = 2e-5  # peak learning rate, of encoder and head alike
    min_lr: float = 0.0  # learning rate at the end
    beta2: float = 0.98  # decay of the squared gradient average
    weight_decay: float = 0.01  # on matrices only, not on norms, embedding or vectors
    scheduler: str = "wsd"  # cosine, wsd (constant, then linear decay) or constant
    decay_fraction: float = 1.0  # wsd: share of the run that decays; 1: all but the warm-up


@dataclass
class FinetunePoolerArgs(PoolerArgs):
    """How the states of a text's tokens become the vector that the head reads; texts and pairs only."""

    # mean, first (<s>), last, max, or attention: cross-attention blocks; with warm_start those of CrossBERT's predictor
    kind: str = "mean"


@dataclass
class QaArgs:
    """Windows over long paragraphs, and which answers are given."""

    stride: int = 128  # tokens between the beginnings of neighbouring windows; they share what stands beyond
    max_question: int = 64  # most tokens of a question; longer ones are cut
    max_answer: int = 30  # most tokens of an answer
    # No answer is given where its score is above the best answer's by more than this; none: the best on the dev
    # questions. Only for data in which some questions have no answer.
    null_threshold: float | None = None

    def __post_init__(self) -> None:
        threshold = self.null_threshold
        checks = {
            "stride": (self.stride >= 1, "at least 1"),
            "max_question": (self.max_question >= 1, "at least 1"),
            "max_answer": (self.max_answer >= 1, "at least 1"),
            "null_threshold": (threshold is None or math.isfinite(threshold), "a finite number"),
        }
        check_fields("qa", self, checks)


@dataclass
class FinetuneArgs:
    """Fine-tune an encoder on one task with one learning rate and one seed; writes RUN/result.json.

    The task is one of GLUE's eight (cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte) or one of your own, whose files are
    given as tasks.NAME.KEY=VALUE.
    """

    dump_dir: str = "???"  # folder of the run; a finished one is left as it is
    task: str = ""  # GLUE's, or a name under tasks
    ckpt: str | None = None  # run folder (its newest complete checkpoint) or checkpoint folder
    model: str | None = None  # instead of ckpt, any Hugging Face encoder: hf:ID on the hub, or its folder
    trust_remote_code: bool = False  # run Python files that come with such a model
    # Start from the encoder of this finished fine-tuning (with keep_weights=true, of the same ckpt or model), such as
    # RTE from MNLI; the result names its task.
    init: str | None = None
    tasks: dict[str, FinetuneTaskArgs] = field(default_factory=dict)
    glue: GlueArgs = field(default_factory=GlueArgs)
    # Share of the training rows held out as dev rows, which stop early, choose the step, the learning rate and the
    # threshold of no answer. 0: the evaluation rows do, as is common on GLUE; optimistic. Not used where dev= is given.
    dev_share: float = 0.1
    train_layers: int = -1  # -1: everything; k: the last k blocks and the final norm; 0: the head alone
    pooler: FinetunePoolerArgs = field(default_factory=FinetunePoolerArgs)
    dropout: float = 0.1  # of what the head reads, in training
    epochs: int = 5  # passes over the training rows, at most
    batch_rows: int = 32  # texts, sentences or windows in an optimizer step
    micro_rows: int = 32  # as many at once; memory decides
    evals_per_epoch: int = 1  # evaluations on the dev rows
    patience: int = 2  # stop after so many evaluations without a better dev score; 0: never. The best step is kept
    keep_weights: bool = False  # write RUN/weights.safetensors, to start others from
    max_length: int | None = None  # most tokens of a sequence; none: the row length of the training data
    batch_tokens: int = 16_384  # most tokens in a forward pass of evaluation, padding included
    dtype: str = "auto"  # compute precision: auto, bf16, fp32
    device: str | None = None  # none: the GPU if there is one
    seed: int = 0  # of the head's weights, the order of rows and dropout
    optim: FinetuneOptimArgs = field(default_factory=FinetuneOptimArgs)
    qa: QaArgs = field(default_factory=QaArgs)

    def __post_init__(self) -> None:
        if (self.ckpt is None) == (self.model is None):
            raise UserError("give one of ckpt=RUN and model=hf:ID")
        if self.model is not None and not self.model.startswith("hf:"):
            raise UserError(f"model={self.model}: expected hf:ID or hf:FOLDER")
        clash = sorted(set(self.tasks) & set(GLUE))
        if clash:
            raise UserError(f"tasks.{clash[0]}: a task of GLUE has this name: give another")
        checks = {
            "dev_share": (0.0 <= self.dev_share < 1.0, "at least 0 and less than 1"),
            "train_layers": (self.train_layers >= -1, "a number of blocks, or -1 for everything"),
            "dropout": (0.0 <= self.dropout < 1.0, "at least 0 and less than 1"),
            "dtype": (self.dtype in ("auto", "bf16", "fp32"), "auto, bf16 or fp32"),
            "patience": (self.patience >= 0, "0 or more"),
            **{
                name: (getattr(self, name) >= 1, "at least 1")
                for name in ("epochs", "batch_rows", "micro_rows", "evals_per_epoch", "batch_tokens")
            },
        }
        check_fields("finetune", self, checks)
        if self.task:
            task_args(self)


def task_args(args: FinetuneArgs) -> FinetuneTaskArgs | None:
    """The task of the user's own that is meant; None: one of GLUE's. Raises UserError if it is neither."""
    known = [name for name in GLUE if name != "mnli_mm"]
    if args.task in args.tasks:
        return args.tasks[args.task]
    if args.task not in known:
        hint = "; mnli has the mismatched rows too" if args.task == "mnli_mm" else ""
        own = f", or one of tasks ({', '.join(args.tasks)})" if args.tasks else ", or a name with tasks.NAME.train=FILE"
        raise UserError(f"task={args.task}: expected one of {', '.join(known)}{own}{hint}")
    return None
