"""Pretrain a CrossBERT: ``python -m apps.crossbert.train config=apps/crossbert/configs/debug.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.args import cli
from lingua.distributed import parallelize, sum_over_ranks, sync_gradients, with_last
from lingua.errors import UserError
from lingua.loss import LossSum
from lingua.masking import complementary_views, hidden_count, predict_part, split_positions
from lingua.optim import Optimizer
from lingua.pretraining import Pretraining
from lingua.run_args import PretrainingArgs


@dataclass
class MaskingArgs:
    """What is hidden from the encoder."""

    hidden_ratio: float = 0.5  # share of each row's positions that are hidden
    complementary: bool = True  # train on a mask and its inverse together (CMS, section 3.2)
    predict_special: bool = False  # also predict <s>, </s> and the like
    predicted_share: float = 1.0  # share of the hidden positions that are predicted, by lot; the others stay hidden

    def __post_init__(self) -> None:
        if not 0.0 < self.predicted_share <= 1.0:
            raise UserError(f"masking.predicted_share={self.predicted_share}: expected a share above 0 and at most 1")

    def flops_args(self) -> tuple[float, bool, float]:
        """What the model's FLOPs depend on."""
        return self.hidden_ratio, self.complementary, self.predicted_share


@dataclass
class CrossBertTrainArgs(PretrainingArgs):
    """CrossBERT pretraining."""

    model: CrossBertArgs = field(default_factory=CrossBertArgs)
    masking: MaskingArgs = field(default_factory=MaskingArgs)

    def __post_init__(self) -> None:
        super().__post_init__()
        for seq_len in self.data.seq_lens():
            hidden_count(seq_len, self.masking.hidden_ratio)


def train(args: CrossBertTrainArgs) -> None:
    """Run or resume the training that ``args`` describes."""
    masking = args.masking
    make_views = complementary_views if masking.complementary else lambda *a: [split_positions(*a)]
    with Pretraining(args, views=2 if masking.complementary else 1) as run:
        special_ids = () if masking.predict_special else run.tokenizer.special_ids
        document_start = run.tokenizer.bos_id if args.data.isolate_documents else None
        with torch.device("meta"):  # shapes only; parallelize() makes the weights where they belong
            model = CrossBert(args.model, special_ids, args.seed, document_start)
        steps = run.total_steps(
            lambda seq_len: model.flops_per_token(seq_len, *masking.flops_args()),
            lambda seq_len: model.row_flops(seq_len, *masking.flops_args()),
        )
        parallelize(model, run.world, args.distributed, run.dtype, args.compile)
        optimizer = Optimizer(model, args.optim, steps)
        for step, micro_batches in run.steps(model, optimizer):
            loss = targets = torch.zeros((), device=run.world.device)
            for rows in micro_batches:
                views = make_views(rows.index_B, rows.tokens_BS.shape[1], masking.hidden_ratio, args.seed)
                views = [predict_part(view, rows.index_B, masking.predicted_share, args.seed) for view in views]
                for view, is_last in with_last(views):
                    sync_gradients(model, when=rows.last and is_last)
                    with run.precision():
                        part = model(rows.tokens_BS, view, rows.weight_B)
                    part.loss.backward()  # a sum: the optimizer divides by the targets of the whole step
                    loss, targets = loss + part.loss.detach(), targets + part.targets
            total = sum_over_ranks(LossSum(loss, targets))
            grad_norm = optimizer.step(step, total)
            run.log(step, total, grad_norm)
            run.validate(step, lambda rows, view: model(rows.tokens_BS, view, rows.weight_B))
            run.save(step)


if __name__ == "__main__":
    cli(CrossBertTrainArgs, train, "python -m apps.crossbert.train")
