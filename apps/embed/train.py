"""Train an embedding model: ``python -m apps.embed.train config=apps/embed/configs/debug.yaml``."""

from __future__ import annotations

from functools import partial

from apps.embed.run import Embedding, EmbedTrainArgs
from lingua.args import cli
from lingua.contrastive import backward_in_parts
from lingua.distributed import parallelize, sum_over_ranks
from lingua.optim import Optimizer


def train(args: EmbedTrainArgs) -> None:
    """Run or resume the training that ``args`` describes."""
    with Embedding(args) as run:
        model = run.build_model()
        parallelize(model, run.world, args.distributed, run.dtype, args.compile)
        optimizer = Optimizer(model, args.optim, run.total_steps())
        for step, batch in run.steps(model, optimizer):
            part = backward_in_parts(model, batch.parts, partial(run.loss, batch), run.precision)
            total = sum_over_ranks(part)
            grad_norm = optimizer.step(step, total)
            run.log(step, total, grad_norm)
            run.validate(step)
            run.save(step, run.objective)


if __name__ == "__main__":
    cli(EmbedTrainArgs, train, "python -m apps.embed.train")
