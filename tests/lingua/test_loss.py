from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lingua import loss as loss_module
from lingua.loss import cross_entropy


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(101, 16, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 101, (37,), generator=generator)
    weights = (torch.rand(37, generator=generator) > 0.3).float()
    return x, weight, targets, weights


@pytest.mark.parametrize("rows", [1, 8, 37, 1000])
def test_loss_and_gradients_equal_pytorchs_in_float64(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", rows)
    monkeypatch.setattr(loss_module, "CACHED_LOGITS", 3 * 101)
    x, weight, targets, weights = inputs()
    total, count = cross_entropy(x, weight, targets, weights)
    (3 * total).backward()
    x2, weight2 = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    expected = (F.cross_entropy(x2 @ weight2.T, targets, reduction="none") * weights).sum()
    (3 * expected).backward()
    assert count == weights.sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight.grad, weight2.grad, rtol=1e-10, atol=1e-12)


def test_bf16_autocast_stays_near_float64() -> None:
    x, weight, targets, weights = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = cross_entropy(x, weight, targets, weights)
    total.backward()
    exact, _ = cross_entropy(x.detach().double(), weight.detach().double(), targets, weights)
    assert total.dtype == torch.float32
    assert x.grad.dtype == torch.float32
    assert abs(float(total.detach() / exact) - 1) < 5e-3


def test_the_softmax_under_bf16_autocast_is_float32() -> None:
    """Logits that are small whole numbers are exact in bf16, so all that is left is the error of the softmax."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, (300, 20), generator=generator).float().requires_grad_()
    x = torch.eye(20).repeat(5, 1).requires_grad_()
    targets = torch.randint(0, 300, (100,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = cross_entropy(x, weight, targets, torch.ones(100))
    expected = F.cross_entropy(x.double() @ weight.double().T, targets, reduction="sum")
    assert abs(float(total.detach() / expected.detach()) - 1) < 1e-6  # bf16 keeps 3 digits


def test_without_gradients_none_are_made() -> None:
    x, weight, targets, weights = inputs()
    with torch.no_grad():
        total, _ = cross_entropy(x, weight, targets, weights)
    expected = (F.cross_entropy(x @ weight.T, targets, reduction="none") * weights).sum()
    torch.testing.assert_close(total, expected)
    assert not total.requires_grad


def test_a_frozen_output_matrix_gets_no_gradient() -> None:
    x, weight, targets, weights = inputs()
    cross_entropy(x, weight.detach(), targets, weights).loss.backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("rows", [5, 700])
def test_z_loss_equals_the_definition_with_its_gradients(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) * 2 for n in (rows, 30))
    targets = torch.randint(0, 30, (rows,), generator=generator)
    counts = (torch.rand(rows, generator=generator) < 0.8).double()
    mine, theirs = ([x.clone().requires_grad_(), weight.clone().requires_grad_()] for _ in range(2))
    found = cross_entropy(*mine, targets, counts, z_loss=0.03)
    logits = theirs[0] @ theirs[1].T
    log_z = logits.exp().sum(1).log()
    expected = ((log_z - logits.gather(1, targets[:, None])[:, 0] + 0.03 * log_z**2) * counts).sum()
    torch.testing.assert_close(found.loss, expected)
    found.loss.backward()
    expected.backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_no_rows_are_no_loss_and_no_gradient() -> None:
    x, weight = torch.empty(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    cross_entropy(x, weight, torch.empty(0, dtype=torch.int64), torch.empty(0)).loss.backward()
    assert x.grad.shape == (0, 4)
    assert torch.equal(weight.grad, torch.zeros(5, 4))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 104), (torch.float32, 112), (torch.bfloat16, 128)])
def test_rows_of_logits_begin_where_a_cache_line_does(dtype: torch.dtype, width: int) -> None:
    """The next multiples of 64 bytes, by hand."""
    logits = loss_module._logits_buffer(3, torch.empty(101, 2, dtype=dtype))
    assert logits.shape == (3, 101)
    assert logits.stride() == (width, 1)
