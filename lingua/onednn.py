"""float32 products of frozen encoders on a CPU by oneDNN, each matrix laid out for it once.

PyTorch gives them to MKL, which on an AMD EPYC does 107 GFLOP/s a core where oneDNN does 250. It is in every build of
PyTorch for x86; where it is not, nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedLinears:
    """The linear layers of a model, with a second copy of their matrices in oneDNN's layout.

    A matrix that has changed since is laid out again, so the model may be trained in between.
    """

    def __init__(self, model: nn.Module) -> None:
        usable = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        # Of what has a forward of its own, such as a compiled one, nothing is known.
        plain = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
        self.linears = plain if usable else []
        self._packed: dict[nn.Linear, tuple[tuple[int, int], Tensor]] = {}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which they compute in oneDNN what is float32, on a CPU, and needs no gradient."""
        for linear in self.linears:
            linear.forward = functools.partial(self._forward, linear)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for linear in self.linears:
                del linear.forward

    def _forward(self, linear: nn.Linear, x: Tensor) -> Tensor:
        wanted = x.dtype == linear.weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
        if not wanted or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, linear.weight, linear.bias)
        weight = linear.weight
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        found = self._packed.get(linear)
        if found is None or found[0] != state:
            found = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            self._packed[linear] = found
        return torch.ops.mkldnn._linear_pointwise(x, found[1], linear.bias, "none", [], "")
