"""Fine-tune an encoder on one task: ``python -m apps.finetune.train task=cola ckpt=runs/x dump_dir=runs/cola``.

One process, one device, one learning rate, one seed. A run that was killed starts again from its beginning and gives
the same result; a finished one is left as it is. Grids: :mod:`apps.finetune.grid`, or ``lingua.stool``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.finetune.args import FinetuneArgs
from apps.finetune.data import Data, Scores, load_data
from apps.finetune.model import Batch, FinetuneModel, Rows
from lingua.args import cli, read_yaml, to_dict, to_yaml
from lingua.checkpoint import resolve
from lingua.distributed import find_ranks, pick_dtype
from lingua.embedder import build_pooler, hf_shape, predictor_weights
from lingua.errors import UserError
from lingua.evaluation.results import writable_folder, write_whole
from lingua.evaluation.tables import file_digest
from lingua.features import TextEncoder, load_encoder
from lingua.frozen import FrozenEncoder, usable_device, weights_digest
from lingua.hashing import permutation
from lingua.hf_encoder import load_hf_encoder
from lingua.loss import add_up
from lingua.optim import Optimizer
from lingua.pooler import Pooler
from lingua.transformer import init_weights

RESULT, WEIGHTS, CONFIG, PREDICTIONS = "result.json", "weights.safetensors", "config.yaml", "predictions.json"
ENCODER = "embedder.encoder."  # how the names of an encoder's weights begin
FREE = ("dump_dir", "device", "micro_rows", "batch_tokens")  # keys without a say in the result
CHECK_STEPS = 50  # between looks at whether steps are non-finite, which wait for the device


def finetune(args: FinetuneArgs) -> dict[str, Any]:
    """Train, keep the step that is best on the dev rows, score it on the evaluation rows and write the result.

    Returns:
        what ``RUN/result.json`` holds.

    Raises:
        UserError: a run of another config in the folder, and whatever the encoder, the task and the model refuse.
    """
    if not args.task:
        raise UserError("no value for task: give one of GLUE's, or a name with tasks.NAME.train=FILE ...")
    if find_ranks()[1] > 1:
        raise UserError(
            "fine-tuning is one process: share out the points of a grid instead (sweep.file of lingua.stool)"
        )
    out = writable_folder(args.dump_dir)
    if args.ckpt is not None:  # by name, since a run that goes on has another newest one at the next point of a grid
        args = dataclasses.replace(args, ckpt=str(resolve(args.ckpt)))
    done = finished(out, args)
    if done is not None:
        print(f"{out}: finished already")
        return done
    encoder = load(args)
    with torch.random.fork_rng(devices=[encoder.device] if encoder.device.startswith("cuda") else []):
        torch.manual_seed(args.seed)
        data = load_data(args, encoder)
        model = FinetuneModel(
            encoder, make_pooler(args, data.kind, encoder), data.kind, data.outputs, args.dropout, args.train_layers
        )
        weights = weights_digest(encoder.model, torch.float32).hex()
        origin = start_from(model, args.init, weights)
        write_whole(out / CONFIG, to_yaml(args).encode())  # not before: what cannot be is put right in the same folder
        history, best, diverged = train(model, data, args)
    result = {
        "task": args.task,
        "kind": data.kind,
        "metrics": list(data.metrics),
        "encoder": args.ckpt or args.model,
        "encoder_weights": weights,
        "init": origin,
        "lr": args.optim.lr,
        "seed": args.seed,
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "chosen_on": data.chosen_on,
        **final(model, data, args, best, diverged, out),
        "baselines": data.baselines,
        "history": history,
        "data": data.facts,
        "config": {key: value for key, value in to_dict(args).items() if key not in FREE},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    write_whole(out / RESULT, (json.dumps(result, indent=1) + "\n").encode())
    told = ", ".join(f"{name} {100 * result['scores'][name]:.1f}" for name in data.metrics if name in result["scores"])
    state = f"DIVERGED ({result['diverged']}): " if result["diverged"] else ""
    print(f"{args.task}, lr {args.optim.lr:g}, seed {args.seed}: {state}{told}; written to {out}/", flush=True)
    return result


def finished(out: Path, args: FinetuneArgs) -> dict[str, Any] | None:
    """The result of a finished run. Raises UserError if the folder is a run of another config or of other data."""
    if not (out / CONFIG).is_file():
        return None
    before, now = read_yaml(out / CONFIG), to_dict(args)
    differs = sorted(key for key in before.keys() | now.keys() if key not in FREE and before.get(key) != now.get(key))
    if differs:
        checkpoints = f"; ckpt={before['ckpt']} there, {args.ckpt} now" if "ckpt" in differs else ""
        raise UserError(
            f"{out} is there already with another config ({', '.join(differs)}{checkpoints}): give a new dump_dir, or "
            "remove it"
        )
    if not (out / RESULT).is_file():
        return None
    result = json.loads((out / RESULT).read_text())
    for facts in result["data"].values():
        for path, digest in facts.get("files", {}).items():
            if Path(path).is_file() and file_digest(path) != digest:
                raise UserError(f"{out} is finished, and {path} has changed since: give a new dump_dir, or remove it")
    return result


def load(args: FinetuneArgs) -> FrozenEncoder:
    """The encoder to start from."""
    device = usable_device(args.device)
    dtype = pick_dtype(args.dtype, torch.device(device.partition(":")[0]))
    if args.ckpt is not None:
        return load_encoder(args.ckpt, max_length=args.max_length, device=device, dtype=dtype)
    name = str(args.model).removeprefix("hf:")
    return load_hf_encoder(name, args.max_length, device, dtype, args.trust_remote_code)


def make_pooler(args: FinetuneArgs, kind: str, encoder: FrozenEncoder) -> Pooler:
    """What makes a text's vector, in its state before training."""
    if kind in ("tokens", "qa") and args.pooler.kind != "mean":
        raise UserError(
            f"pooler.kind={args.pooler.kind}: a {kind} task reads the states of tokens, not a text's vector"
        )
    if isinstance(encoder, TextEncoder):
        config, shape = encoder.config, encoder.encoder.args
    else:
        config, shape = {}, hf_shape(encoder.model.config)
    pooler = build_pooler(args.pooler, shape, config)
    init_weights(pooler, shape, args.seed)
    if args.pooler.warm_start:
        weights = predictor_weights(resolve(str(args.ckpt)), config["model"]["predictor"], shape)
        pooler.load_state_dict(pooler.warm_start(weights))
    return pooler


def start_from(model: FinetuneModel, init: str | None, weights_before: str) -> dict[str, str] | None:
    """Take over the encoder of another fine-tuning; gives its task and folder.

    Args:
        weights_before: digest of the encoder's weights. The other must have begun with the same.
    """
    if init is None:
        return None
    from safetensors.torch import load_file

    folder = Path(init)
    for name in (RESULT, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"init={init}: no {name}: expected a finished fine-tuning with keep_weights=true")
    result = json.loads((folder / RESULT).read_text())
    if result["diverged"]:
        raise UserError(f"init={init}: this run diverged ({result['diverged']})")
    weights = {k.removeprefix(ENCODER): v for k, v in load_file(folder / WEIGHTS).items() if k.startswith(ENCODER)}
    own = model.embedder.encoder.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in own.items()}:
        raise UserError(f"init={init}: its encoder ({result['encoder']}) has other weights than the one here")
    if result.get("encoder_weights", weights_before) != weights_before:
        raise UserError(
            f"init={init}: is a fine-tuning of another encoder ({result['encoder']}): give that, or fine-tune this one"
        )
    model.embedder.encoder.load_state_dict(weights)
    return {"task": result["task"], "folder": init}


def train(
    model: FinetuneModel, data: Data, args: FinetuneArgs
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, str | None]:
    """The loop.

    Returns:
        the evaluations on the dev rows; the best of them with ``weights``, those that are trained (the last of equals;
        None: there was none); and why the run diverged, or None.
    """
    rows = data.parts["train"]
    per_epoch = math.ceil(len(rows) / args.batch_rows)
    steps = args.epochs * per_epoch
    evaluations = {
        round(per_epoch * k / args.evals_per_epoch) for k in range(1, args.epochs * args.evals_per_epoch + 1)
    }
    optimizer = Optimizer(model, args.optim, steps)
    history: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    losses, waited = [], 0
    for step, index_B in enumerate(batches(len(rows), args), start=1):
        losses.append(update(model, optimizer, rows, index_B, step, args))
        is_due = step in evaluations
        if is_due or step % CHECK_STEPS == 0:
            stuck = int(optimizer.in_a_row)
            if stuck and (is_due or stuck >= args.optim.max_nonfinite):
                return history, best, f"loss or gradient not finite at step {step}"
        if not is_due:
            continue
        outputs = model.outputs(data.parts["dev"], args.batch_tokens)
        if not all(np.isfinite(out).all() for out in outputs):
            return history, best, f"outputs not finite at step {step}"
        scores = data.score("dev", outputs, None)
        loss = float(torch.stack(losses).mean())
        history.append({"step": step, "epoch": step / per_epoch, "loss": loss, "dev": scores})
        losses.clear()
        primary = data.metrics[0]
        print(f"step {step}/{steps}: loss {loss:.4f}, dev {primary} {100 * scores[primary]:.2f}", flush=True)
        waited = 0 if best is None or scores[primary] > best["dev"][primary] else waited + 1
        if best is None or scores[primary] >= best["dev"][primary]:
            best = {**history[-1], "weights": trained_weights(model)}
        if args.patience and waited >= args.patience:
            break
    return history, best, None


def batches(count: int, args: FinetuneArgs) -> Iterator[np.ndarray]:
    """Row numbers of each step, every row once an epoch, in an order that is a function of seed and epoch."""
    for epoch in range(args.epochs):
        order = permutation(count, args.seed, epoch)
        for start in range(0, count, args.batch_rows):
            yield order[start : start + args.batch_rows]


def update(
    model: FinetuneModel, optimizer: Optimizer, rows: Rows, index_B: np.ndarray, step: int, args: FinetuneArgs
) -> Tensor:
    """One step; gives the mean loss of its targets, on the device."""
    model.train()
    parts = []
    for start in range(0, len(index_B), args.micro_rows):
        batch = Batch.of(rows, index_B[start : start + args.micro_rows], model.pad_id, model.device)
        part = model.loss(batch)
        part.loss.backward()
        parts.append(part)
    total = add_up(parts)
    optimizer.step(step, total)
    return total.loss / total.targets


def trained_weights(model: FinetuneModel) -> dict[str, Tensor]:
    """A copy of what training changes."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def final(
    model: FinetuneModel,
    data: Data,
    args: FinetuneArgs,
    best: dict[str, Any] | None,
    diverged: str | None,
    out: Path,
) -> dict[str, Any]:
    """Scores of the best step on the evaluation rows, and whether the run counts as diverged.

    A run that is not finite is scored as ``majority``, whatever it had learned before; one that is no better than
    ``majority`` at its best step keeps its own score and is marked.
    """
    majority, primary = data.baselines["majority"], data.metrics[0]
    nothing = {"step": None, "dev": None, "scores": majority, "diverged": diverged}
    if diverged or best is None:
        return nothing
    model.load_state_dict(best["weights"], strict=False)
    outputs = {
        part: model.outputs(rows, args.batch_tokens)
        for part, rows in data.parts.items()
        if part not in ("train", "dev")
    }
    if not all(np.isfinite(array).all() for arrays in outputs.values() for array in arrays):
        return nothing | {"diverged": "outputs not finite on the evaluation rows"}
    scores: Scores = {}
    for part, arrays in outputs.items():
        prefix = "" if part == "test" else f"{part}_"
        scores |= {f"{prefix}{name}": value for name, value in data.score(part, arrays, best["dev"]).items()}
    write_whole(out / PREDICTIONS, (json.dumps(data.predictions(outputs["test"], best["dev"])) + "\n").encode())
    if args.keep_weights:
        from safetensors.torch import save

        state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        write_whole(out / WEIGHTS, save(state))
    if not scores[primary] > majority[primary]:
        diverged = f"no better than the majority ({primary} {100 * majority[primary]:.1f})"
    return {"step": best["step"], "dev": best["dev"], "scores": scores, "diverged": diverged}


if __name__ == "__main__":
    cli(FinetuneArgs, finetune, "python -m apps.finetune.train")
