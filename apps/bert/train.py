"""Pretrain a BERT: ``python -m apps.bert.train config=apps/bert/configs/debug.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from apps.bert.model import Bert, BertArgs
from lingua.args import cli
from lingua.distributed import parallelize, sum_over_ranks, sync_gradients
from lingua.loss import LossSum
from lingua.masking import ReplaceArgs, View, hidden_count, mask_tokens, split_positions
from lingua.optim import Optimizer
from lingua.run import Run
from lingua.run_args import RunArgs


@dataclass
class MlmArgs:
    """What is masked, and what stands in its place."""

    hidden_ratio: float = 0.2  # share of each row's positions that are predicted (Table 6)
    replace: ReplaceArgs = field(default_factory=ReplaceArgs)  # 80/10/10 and the like
    predict_special: bool = False  # also mask and predict <s>, </s> and the like


@dataclass
class BertTrainArgs(RunArgs):
    """BERT pretraining."""

    model: BertArgs = field(default_factory=BertArgs)
    masking: MlmArgs = field(default_factory=MlmArgs)

    def __post_init__(self) -> None:
        super().__post_init__()
        for seq_len in self.data.seq_lens():
            hidden_count(seq_len, self.masking.hidden_ratio)


def train(args: BertTrainArgs) -> None:
    """Run or resume the training that ``args`` describes."""
    masking = args.masking
    with Run(args, views=1) as run:
        special_ids = () if masking.predict_special else run.tokenizer.special_ids
        mask_id = run.tokenizer.mask_id
        document_start = run.tokenizer.bos_id if args.data.isolate_documents else None
        with torch.device("meta"):  # shapes only; parallelize() makes the weights where they belong
            model = Bert(args.model, special_ids, args.seed, document_start)
        steps = run.total_steps(model.flops_per_token, lambda seq_len: model.row_flops(seq_len, masking.hidden_ratio))
        parallelize(model, run.world, args.distributed, run.dtype, args.compile)
        optimizer = Optimizer(model, args.optim, steps)

        def validation_loss(tokens_BS: Tensor, view: View, weight_B: Tensor) -> LossSum:
            return model(mask_tokens(tokens_BS, view.hidden_BM, mask_id, special_ids), tokens_BS, view, weight_B)

        for step, micro_batches in run.steps(model, optimizer):
            loss = targets = torch.zeros((), device=run.world.device)
            for rows in micro_batches:
                view = split_positions(rows.index_B, rows.tokens_BS.shape[1], masking.hidden_ratio, args.seed)
                inputs_BS = mask_tokens(
                    rows.tokens_BS, view.hidden_BM, mask_id, special_ids,
                    masking.replace, rows.index_B, args.seed, run.tokenizer.vocab_size,
                )  # fmt: skip
                sync_gradients(model, when=rows.last)
                with run.precision():
                    part = model(inputs_BS, rows.tokens_BS, view, rows.weight_B)
                part.loss.backward()  # a sum: the optimizer divides by the targets of the whole step
                loss, targets = loss + part.loss.detach(), targets + part.targets
            total = sum_over_ranks(LossSum(loss, targets))
            grad_norm = optimizer.step(step, total)
            run.log(step, total, grad_norm)
            run.validate(step, validation_loss)
            run.save(step)


if __name__ == "__main__":
    cli(BertTrainArgs, train, "python -m apps.bert.train")
