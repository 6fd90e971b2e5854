"""One rank of ``tests/lingua/test_distributed.py``: every parallel mode against the plain model, in one process group.

``python -m tests.grid OUT.json MODES.json``, where a mode is a dict of DistributedArgs, plus ``compile`` and ``app``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apps.bert.electra import Electra, RtdArgs
from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.distributed import (
    DistributedArgs,
    World,
    full,
    parallelize,
    precision,
    start,
    sum_over_ranks,
    sync_gradients,
)  # fmt: skip
from lingua.loss import add_up
from lingua.masking import complementary_views, split_positions
from lingua.optim import OptimArgs, Optimizer
from lingua.predictor import PredictorArgs
from lingua.storage import check_shared

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 200, "init_std": 0.1}
# What models of the hub have beyond that.
PUBLIC = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "biases": ["qkv", "ffn"], "tied": False, "qk_norm": True}
ROWS, STEPS = 8, 3


def build(app: str) -> nn.Module:
    with torch.device("meta"):
        if app in ("bert", "clm", "public"):
            return Bert(BertArgs(**SHAPE | (PUBLIC if app == "public" else {})), special_ids=(0,), seed=3)
        if app.startswith("electra"):
            rtd = RtdArgs(n_layers=1, dim=16, disentangled=app == "electra_disentangled")
            return Electra(BertArgs(**SHAPE), rtd, special_ids=(0,), seed=3)
        switches = {"self_attention": True, "mix_layers": True} if app == "crossbert_switches" else {}
        args = CrossBertArgs(**SHAPE, predictor=PredictorArgs(n_layers=1, **switches))
        return CrossBert(args, special_ids=(0,), seed=3)


def run(
    app: str, world: World, args: DistributedArgs, dtype: torch.dtype, compile: bool, matrices: str = "adamw"
) -> dict[str, Any]:
    """Losses, gradient norms and final weights of three steps of two micro-batches a rank."""
    torch.compiler.reset()
    model = parallelize(build(app), world, args, dtype, compile)
    optimizer = Optimizer(model, OptimArgs(lr=0.01, warmup=0, clip=0.5, matrices=matrices), STEPS)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(1, 200, (ROWS, 16), generator=generator)[world.rank :: world.size]
        index = torch.arange(ROWS)[world.rank :: world.size] + ROWS * step
        parts = []
        half = len(index) // 2
        for number, part in enumerate((slice(0, half), slice(half, None))):
            views = complementary_views if app.startswith("crossbert") else lambda *a: [split_positions(*a)]
            (view,) = views(index[part], 16, 0.5, 0)
            sync_gradients(model, when=number == 1)
            with precision(dtype, world.device):
                inputs = (tokens[part],) if app.startswith("crossbert") else (tokens[part], tokens[part])
                more = (torch.ones(half), index[part], torch.tensor(0.5)) if app.startswith("electra") else ()
                loss = model(*inputs, None if app == "clm" else view, *more)
            loss.loss.backward()
            parts.append(loss)
        total = sum_over_ranks(add_up(parts))
        norms.append(float(optimizer.step(step, total)))
        losses.append(float(total.loss / total.targets))
    weights = {name: full(parameter.detach()).double() for name, parameter in model.named_parameters()}
    tied = model.encoder.embedding.weight is dict(model.named_parameters())["encoder.embedding.weight"]
    return {"losses": losses, "norms": norms, "weights": weights, "tied": tied}


def watch_traffic(seen: Counter[str]) -> None:
    """Count what FSDP gathers and reduces, by operation and precision."""
    for name in ("all_gather_single", "reduce_scatter_single"):
        real = getattr(dist, name)

        def call(*args: Any, name: str = name, real: Any = real, **given: Any) -> Any:
            tensor = next(value for value in (*args, *given.values()) if isinstance(value, torch.Tensor))
            seen[f"{name} {str(tensor.dtype).removeprefix('torch.')}"] += 1
            return real(*args, **given)

        setattr(dist, name, call)


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    return {
        "losses": max(abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)),
        "norms": max(abs(x - y) for x, y in zip(a["norms"], b["norms"], strict=True)),
        "weights": max(float((a["weights"][name] - b["weights"][name]).abs().max()) for name in a["weights"]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, modes = Path(sys.argv[1]), json.loads(sys.argv[2])
    world = start(60)
    plain: dict[tuple[str, str, str], dict[str, Any]] = {}
    traffic: Counter[str] = Counter()
    watch_traffic(traffic)
    results = []
    for mode in modes:
        app, dtype, compile = mode.pop("app"), mode.pop("dtype", "fp64"), mode.pop("compile", False)
        matrices = mode.pop("matrices", "adamw")
        kind = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        if (app, dtype, matrices) not in plain:
            # Alone, as if there were no others; the sums over ranks then count everything world.size times.
            alone = World(world.device)
            real, dist.is_initialized = dist.is_initialized, lambda: False
            plain[app, dtype, matrices] = run(app, alone, DistributedArgs(), kind, False, matrices)
            dist.is_initialized = real
        traffic.clear()
        found = run(app, world, DistributedArgs(**mode), kind, compile, matrices)
        far = difference(found, plain[app, dtype, matrices])
        results.append({**far, "tied": found["tied"], "traffic": dict(traffic)})
    facts = {"the data": {"made_up": "same"}, "the code": {"sha256": "a" if world.is_first else "b"}}
    try:
        world.check_same(facts)
        said = ""
    except ValueError as error:
        said = str(error)
    try:
        check_shared(out.parent / f"disk_of_{world.rank}", world)
        unshared = ""
    except ValueError as error:
        unshared = str(error)
    if world.is_first:
        out.write_text(json.dumps({"results": results, "said": said, "unshared": unshared}))
    dist.barrier()
    sys.stdout.flush()
    import os

    os._exit(0)
