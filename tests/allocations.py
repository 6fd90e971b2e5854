"""The peak of a training step by PyTorch's own allocator, on a CPU: what estimates are compared with.

``python -m tests.allocations OUT.json CASES.json`` measures on the ranks of one process group.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lingua.args import build
from lingua.distributed import DTYPES, local, parallelize, precision, start, sync_gradients
from lingua.loss import add_up
from lingua.masking import complementary_views, split_positions
from lingua.optim import OptimArgs, Optimizer
from lingua.stool.plan import load_script, meta_model

SEQ, ROWS = 64, 16


def make(
    app: str,
    checkpointing: str = "none",
    dtype: str = "fp32",
    vocab: int = 2000,
    shard: int = 1,
    predictor: dict[str, Any] | None = None,
    objective: str = "mlm",
    **shape: Any,
) -> tuple:
    """An app's config at small size, and its model on the meta device; ``shape`` goes to its section ``model``."""
    script = load_script(f"apps.{app}.train")
    model: dict[str, Any] = {"dim": 128, "n_layers": 4, "n_heads": 2, "vocab_size": vocab, **shape}
    if app == "crossbert":
        model["predictor"] = {"n_layers": 2, **(predictor or {})}
    own = {"objective": objective} if app == "bert" else {}
    spread = {"activation_checkpointing": checkpointing, "dp_shard": shard}
    values = {"dump_dir": "x", "steps": 1, "dtype": dtype, "data": {"root_dir": "x", "seq_len": SEQ}}
    config = build(script.config_class, ("test", values | own | {"model": model, "distributed": spread}))
    return config, meta_model(script.module, config)


def measure(app: str, passes: int = 1, **case: Any) -> float:
    """Bytes held at most in the second of two steps: weights and moments, and all that comes and goes."""
    config, model = make(app, **case)
    world, dtype = start(60.0), DTYPES[config.dtype]
    parallelize(model, world, config.distributed, dtype, False)
    optimizer = Optimizer(model, OptimArgs(warmup=0), 10)
    tokens_BS = torch.randint(0, config.model.vocab_size, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    rows_B, weight_B = torch.arange(ROWS), torch.ones(ROWS)

    def step() -> None:
        parts = []
        for i in range(passes):
            sync_gradients(model, when=i == passes - 1)
            with precision(dtype, world.device):
                if app == "crossbert":
                    (view,) = complementary_views(rows_B, SEQ, 0.5, 0)
                    part = model(tokens_BS, view, weight_B)
                else:
                    view = None if config.objective == "clm" else split_positions(rows_B, SEQ, 0.2, 0)
                    part = model(tokens_BS, tokens_BS, view, weight_B)
            part.loss.backward()
            parts.append(type(part)(*(value.detach() for value in part)))
            del part
        optimizer.step(1, add_up(parts))

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return 3 * sum(local(p).nbytes for p in model.parameters()) + most


if __name__ == "__main__":
    found = [measure(**case) for case in json.loads(Path(sys.argv[2]).read_text())]
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.barrier()
