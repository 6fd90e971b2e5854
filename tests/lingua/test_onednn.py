"""Products by oneDNN against float64, and when they must not be used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lingua.onednn import PackedLinears


def ran_in_onednn(function) -> bool:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return any(event.key == "mkldnn::_linear_pointwise" for event in seen.key_averages())


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 40, bias=False))


@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (1, 48), (0, 48)])
@torch.no_grad()
def test_it_is_the_same_product(model: nn.Sequential, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    expected = nn.Sequential(*model).double()(x.double())
    model.float()
    with PackedLinears(model).in_use():
        assert ran_in_onednn(lambda: model(x)) == (x.numel() > 0)
        found = model(x)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert not ran_in_onednn(lambda: model(x))  # no more
    assert "forward" not in vars(model[0])


@torch.no_grad()
def test_changed_and_replaced_matrices_are_laid_out_again(model: nn.Sequential) -> None:
    x, packed = torch.randn(3, 48), PackedLinears(model)
    with packed.in_use():
        before = model(x)
    model[0].weight.mul_(-0.5)
    model[2].weight = nn.Parameter(torch.randn(40, 96))
    with packed.in_use():
        after = model(x)
    assert torch.allclose(after, model(x), atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-2)


def test_other_precisions_and_gradients_go_the_usual_way(model: nn.Sequential) -> None:
    x = torch.randn(3, 48)
    with PackedLinears(model).in_use():
        assert not ran_in_onednn(lambda: model(x).sum().backward())
        assert model[0].weight.grad is not None
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        with torch.no_grad():
            assert ran_in_onednn(lambda: model(x))
            model.double()
            assert model(x.double()).dtype == torch.float64


def test_a_failure_inside_leaves_the_model_as_it_was(model: nn.Sequential) -> None:
    with pytest.raises(ZeroDivisionError), PackedLinears(model).in_use():
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])


def test_a_model_made_for_inference_alone() -> None:
    with torch.inference_mode():
        linear = nn.Linear(16, 8)
        x = torch.randn(2, 16)
        with PackedLinears(linear).in_use():
            assert torch.allclose(linear(x), x @ linear.weight.T + linear.bias, atol=1e-6)
