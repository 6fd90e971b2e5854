"""The run of a pretraining: token shards as rows, lengths in tokens or FLOPs, losses on held-out rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lingua import checkpoint, resume
from lingua.attention import check_attention
from lingua.data import Position, Rows, TokenStream
from lingua.errors import UserError
from lingua.flops import ForwardFlops, device_peak, utilization
from lingua.logger import Interval
from lingua.loss import Sums
from lingua.masking import View
from lingua.run import Run, log
from lingua.run_args import PretrainingArgs
from lingua.source import TokenSource
from lingua.tokenizer import build_tokenizer, save_copy
from lingua.validate import validate


class Pretraining(Run):
    """One pretraining; see ``apps/crossbert/train.py`` for how a loop uses it.

    Args:
        args: the app's config.
        views: how many views of each row the objective trains on (2 with complementary masks).
    """

    args: PretrainingArgs

    def __init__(self, args: PretrainingArgs, views: int) -> None:
        row_tokens = views * args.data.seq_len
        if args.batch_tokens < row_tokens or args.batch_tokens % row_tokens:
            nearest = max(1, round(args.batch_tokens / row_tokens)) * row_tokens
            raise UserError(
                f"batch_tokens={args.batch_tokens} is not a whole number of rows: a row of data.seq_len="
                f"{args.data.seq_len} counts {row_tokens} tokens with {views} view{'s' * (views > 1)}; "
                f"the nearest that fits is {nearest}"
            )
        self.views = views
        self.tokenizer = build_tokenizer(args.data.tokenizer)
        if args.model.vocab_size not in (-1, self.tokenizer.vocab_size):
            raise UserError(
                f"model.vocab_size={args.model.vocab_size}, but the tokenizer has {self.tokenizer.vocab_size}: use -1"
            )
        args.model.vocab_size = self.tokenizer.vocab_size
        super().__init__(args)

    def open_data(self, own: Path | None, state: dict[str, Any]) -> None:
        args, world, position = self.args, self.world, None
        isolated = args.data.isolate_documents
        check_attention(args.model.attention, isolated, args.model.head_sizes(), world.device, self.dtype, args.compile)
        self._peak = device_peak(world.device, self.dtype)
        self._init: Path | None = None
        if own is not None:
            resume.check_tokenizer(own, state, self.tokenizer, args.data.tokenizer)
            position = Position(**state["stream_start"])
        elif args.init.path is not None:
            found = checkpoint.verified(checkpoint.resolve(args.init.path)) if world.is_first else None
            self._init = world.from_first(found)
            state = checkpoint.read_state(self._init)
            resume.check_tokenizer(self._init, state, self.tokenizer, args.data.tokenizer)
            resume.check_init(self._init, args.model, args.init.fresh)
            position = Position(**state["stream_end"]) if args.init.position else None
        rows = args.batch_tokens // (self.views * args.data.seq_len)
        self.stream = TokenStream(
            args.data, self.tokenizer, args.seed, rows, args.micro_rows, world.rank, world.size, self.views, position
        )
        self.validation_sets = {
            name: TokenSource(folder, args.data.seq_len, 0, self.tokenizer, cache=self.stream.cache)
            for name, folder in args.data.validation.items()
        }

    def write_more(self) -> None:
        save_copy(self.tokenizer, self.folder / "tokenizer")

    def begin(self) -> None:
        init = self.args.init
        if self._init is not None:
            optimizer = self.optimizer.parts if init.optimizer else None
            checkpoint.load(self._init, self.model, optimizer, self.world.saving, init.fresh)
            log.info("starting from the weights of %s%s", self._init, f", but for {init.fresh}" if init.fresh else "")

    def batches(self, first: int, last: int) -> Iterator[list[Rows]]:
        """Micro-batches of each step."""
        for micro_batches in self.stream.steps(first, last):
            yield [rows.to(self.world.device) for rows in micro_batches]

    def fingerprints(self) -> dict[str, str]:
        return self.stream.fingerprints()

    def data_state(self, step: int) -> dict[str, Any]:
        return {
            "stream_start": asdict(self.stream.position(0)),
            "stream_end": asdict(self.stream.position(step)),
            "tokenizer": self.tokenizer.identity(),
        }

    def total_steps(self, flops_per_token: Callable[[int], float], row_flops: Callable[[int], ForwardFlops]) -> int:
        """Optimizer steps of the whole run: the nearest whole number, at least one.

        Args:
            flops_per_token: the paper's F per view token, as a function of the row length.
            row_flops: what the forward pass of one row costs the hardware, likewise.
        """
        self.flops_per_token, self.row_flops = flops_per_token, row_flops
        if self.args.steps is not None:
            return self.args.steps
        if self.args.tokens is not None:
            return max(1, round(self.args.tokens / self.args.batch_tokens))
        # F depends on the row length, so a budget is used up phase by phase; the last phase has no end.
        left = self.args.flops
        for phase, steps in self.stream.phase_steps(sys.maxsize):
            a_step = self.args.batch_tokens * flops_per_token(phase.seq_len)
            if left <= steps * a_step:
                break
            left -= steps * a_step
        return max(1, phase.first_step - 1 + round(left / a_step))

    def flops(self, step: int) -> float:
        """Training FLOPs of the first ``step`` steps, as the paper counts them."""
        return sum(
            steps * self.args.batch_tokens * self.flops_per_token(phase.seq_len)
            for phase, steps in self.stream.phase_steps(step)
        )

    def figures(self, step: int, interval: Interval) -> dict[str, float]:
        args, seq_len = self.args, self.stream.phase(step).seq_len
        tokens = (step - interval.first_step) * args.batch_tokens
        return {
            "tokens": step * args.batch_tokens,
            "data_tokens": step * args.batch_tokens // self.views,
            "flops": self.flops(step),
            **self.stream.progress(step),
            "tokens_per_second": tokens / interval.training,
            "data_tokens_per_second": tokens / self.views / interval.training,
            **utilization(
                self.row_flops(seq_len) * (tokens // (self.views * seq_len)),
                self.flops(step) - self.flops(interval.first_step),
                interval.training,
                self.world.size,
                self._peak,
                args.distributed.activation_checkpointing,
            ),
        }

    def validate(self, step: int, loss: Callable[[Rows, View], Sums], masked: bool = True) -> None:
        """Losses on every validation set at every ratio, at the validation cadence and at the end.

        Args:
            loss, masked: see :func:`lingua.validate.validate`.
        """
        self.validate_by(step, lambda: validate(self.validation_sets, self.args.validation, self.world, loss, masked))
