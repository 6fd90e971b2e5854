"""Pretrain a BERT or an ELECTRA: ``python -m apps.bert.train config=apps/bert/configs/debug.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from apps.bert.electra import Electra, RtdArgs, step_share
from apps.bert.model import Bert, BertArgs
from apps.bert.stages import StageArgs, Stages, check_stages
from lingua.args import cli
from lingua.data import Rows
from lingua.distributed import parallelize, sum_over_ranks, sync_gradients
from lingua.errors import UserError
from lingua.loss import LossSum, add_up
from lingua.masking import ReplaceArgs, View, hidden_count, mask_tokens, split_positions
from lingua.optim import Optimizer
from lingua.pretraining import Pretraining
from lingua.run_args import PretrainingArgs


@dataclass
class MlmArgs:
    """What is masked, and what stands in its place."""

    hidden_ratio: float = 0.2  # share of each row's positions that are predicted (Table 6); clm has no masks
    replace: ReplaceArgs = field(default_factory=ReplaceArgs)  # 80/10/10 and the like
    predict_special: bool = False  # also mask and predict <s>, </s> and the like


@dataclass
class BertTrainArgs(PretrainingArgs):
    """BERT pretraining."""

    objective: str = "mlm"  # mlm (BERT), rtd (replaced token detection: ELECTRA) or clm (each next token, causal)
    stages: dict[str, StageArgs] = field(default_factory=dict)  # instead, one after another under names of your own
    model: BertArgs = field(default_factory=BertArgs)
    masking: MlmArgs = field(default_factory=MlmArgs)
    rtd: RtdArgs = field(default_factory=RtdArgs)  # for objective=rtd

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stages(self.objective, self.stages, self.optim)
        if self.objective == "rtd":
            self.rtd.generator(self.model)
        objectives = [stage.objective for stage in self.stages.values()] or [self.objective]
        if objectives != ["clm"] * len(objectives):  # clm alone hides nothing
            for seq_len in self.data.seq_lens():
                hidden_count(seq_len, self.masking.hidden_ratio)
        if "clm" in objectives and self.data.isolate_documents and self.model.attention in ("varlen", "xformers"):
            raise UserError(
                f"model.attention={self.model.attention} is not causal within documents here, which clm needs: "
                "use auto, sdpa or flex"
            )


def train(args: BertTrainArgs) -> None:
    """Run or resume the training that ``args`` describes."""
    masking = args.masking
    with Pretraining(args, views=1) as run:
        special_ids = () if masking.predict_special else run.tokenizer.special_ids
        mask_id = run.tokenizer.mask_id
        more = special_ids, args.seed, run.tokenizer.bos_id if args.data.isolate_documents else None
        is_rtd = args.objective == "rtd"
        with torch.device("meta"):  # shapes only; parallelize() makes the weights where they belong
            model = Electra(args.model, args.rtd, *more) if is_rtd else Bert(args.model, *more)
        objective = args.objective  # of the step that runs
        steps = run.total_steps(
            model.flops_per_token,
            lambda seq_len: model.row_flops(seq_len, None if objective == "clm" else masking.hidden_ratio),
        )
        stages = Stages(args.objective, args.stages, args.optim, steps)
        parallelize(model, run.world, args.distributed, run.dtype, args.compile)
        optimizer = Optimizer(model, args.optim, steps, stages.learning_rate)

        def batch(rows: Rows) -> tuple[Tensor, Tensor, View | None, Tensor]:
            if objective == "clm":
                return rows.tokens_BS, rows.tokens_BS, None, rows.weight_B
            view = split_positions(rows.index_B, rows.tokens_BS.shape[1], masking.hidden_ratio, args.seed)
            inputs_BS = mask_tokens(
                rows.tokens_BS, view.hidden_BM, mask_id, special_ids,
                masking.replace, rows.index_B, args.seed, run.tokenizer.vocab_size,
            )  # fmt: skip
            return inputs_BS, rows.tokens_BS, view, rows.weight_B

        def validation_loss(rows: Rows, view: View) -> LossSum:
            if objective == "clm":
                return model(*batch(rows))
            inputs_BS = mask_tokens(rows.tokens_BS, view.hidden_BM, mask_id, special_ids)
            return model(inputs_BS, rows.tokens_BS, view, rows.weight_B, *((rows.index_B,) if is_rtd else ()))

        for step, micro_batches in run.steps(model, optimizer):
            objective = stages.at(step).objective
            batches = [batch(rows) for rows in micro_batches]
            share = step_share(batches, special_ids) if is_rtd else None
            parts = []
            for rows, inputs in zip(micro_batches, batches, strict=True):
                sync_gradients(model, when=rows.last)
                with run.precision():
                    part = model(*inputs, rows.index_B, share) if is_rtd else model(*inputs)
                part.loss.backward()  # a sum: the optimizer divides by the targets of the whole step
                parts.append(part)
            total = sum_over_ranks(add_up(parts))
            grad_norm = optimizer.step(step, total)
            run.log(step, total, grad_norm)
            run.validate(step, validation_loss, masked=objective != "clm")
            run.save(step, objective)


if __name__ == "__main__":
    cli(BertTrainArgs, train, "python -m apps.bert.train")
