from __future__ import annotations

import pytest
import torch

from lingua.attention import attention


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """One query, one head at a time."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            for h in range(q.shape[2]):
                scores = k[b, :, h] @ q[b, s, h] / q.shape[-1] ** 0.5
                if mask is not None:
                    scores = scores.masked_fill(~mask[b, 0, min(s, mask.shape[2] - 1)], -torch.inf)
                out[b, s, h] = scores.softmax(0) @ v[b, :, h]
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
def test_every_path_equals_plain_loops_in_float64(dtype: torch.dtype, tolerance: float, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 3, 8, generator=generator).to(dtype)
    k, v = (torch.randn(2, 7, 3, 8, generator=generator).to(dtype) for _ in range(2))
    mask = (torch.arange(7) < torch.tensor([7, 4])[:, None])[:, None, None, :] if masked else None
    expected = reference(q.double(), k.double(), v.double(), mask)
    out = attention(q, k, v, mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


def test_a_query_that_may_look_nowhere_gets_zeros_and_finite_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 2, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False], [False, False]])[None, None]
    out = attention(q, k, v, mask)
    assert (out[:, 1] == 0).all()
    torch.testing.assert_close(out[:, 0], v[:, 0])
    out.sum().backward()
    assert (q.grad[:, 1] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
