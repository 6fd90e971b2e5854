"""Each attention backend on random documents against float64: errors and, on a GPU, time. A part of gpu_smoke."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lingua.attention import Mask, attention, check_attention, document_mask
from lingua.errors import UserError
from lingua.masking import documents, split_positions


def backend_errors(
    backend: str, dtype: torch.dtype, device: torch.device, B: int, S: int, H: int, K: int
) -> dict[str, dict[str, Any]] | str:
    """A row's attention on itself, and that of its hidden positions on its visible ones, forward and backward.

    Args:
        B, S, H, K: rows, positions in a row, heads, head size.

    Returns:
        by case, ``errors`` of output and of the gradients of queries, keys and values (norm of the difference over
        the norm) and ``ms`` of a forward and backward pass; or why this machine cannot run it.
    """
    try:
        check_attention(backend, True, [K], device, dtype, compile=False)
    except UserError as error:
        return f"not run: {error}"
    generator = torch.Generator().manual_seed(0)
    result = {}
    for case, (queries, keys) in cases(B, S, device).items():
        shapes = ((B, n, H, K) for n in (queries.shape[1], keys.shape[1], keys.shape[1], queries.shape[1]))
        inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        expected = _forward_and_gradients([x.double() for x in inputs], document_mask("sdpa", queries, keys))
        mask = document_mask(backend, queries, keys)
        found = _forward_and_gradients(inputs, mask)
        errors = [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]
        again = partial(_forward_and_gradients, inputs, mask)
        result[case] = {"errors": errors, "ms": milliseconds(again, device) if device.type == "cuda" else None}
    return result


def cases(B: int, S: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Documents of queries and of keys. In ``cross``, some queries have no key and some documents no query."""
    generator = torch.Generator().manual_seed(0)
    documents_BS = documents((torch.rand(B, S, generator=generator) > 0.05).long(), start_id=0).to(device)
    view = split_positions(torch.arange(B, device=device), S, 0.5, 0)
    hidden_BM, visible_BT = documents_BS.gather(1, view.hidden_BM), documents_BS.gather(1, view.visible_BT)
    hidden_BM[0, :3] = 0
    visible_BT[0] = visible_BT[0].clamp(min=1)  # the first queries see nothing
    hidden_BM[0] = hidden_BM[0].clamp(max=int(visible_BT[0].max()) - 1)  # nobody looks at the last document
    return {"self": (documents_BS, documents_BS), "cross": (hidden_BM, visible_BT)}


def _forward_and_gradients(inputs: list[Tensor], mask: Mask) -> list[Tensor]:
    """Output, and the gradients of queries, keys and values where the output's is the last input."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def milliseconds(step: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median time of a call after three that warm up, by the clock of the device."""
    times = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begun))
    return median(times[3:])
