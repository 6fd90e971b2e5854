from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lingua.errors import UserError
from lingua.loss import LossSum
from lingua.optim import OptimArgs, Optimizer, learning_rate, parameter_groups


def test_cosine_by_hand() -> None:
    args = OptimArgs(lr=1.0, min_lr=0.1, warmup=10)
    assert learning_rate(1, 110, args) == pytest.approx(0.1)
    assert learning_rate(10, 110, args) == 1.0
    assert learning_rate(60, 110, args) == pytest.approx(0.55)  # half way
    assert learning_rate(110, 110, args) == pytest.approx(0.1)
    assert learning_rate(35, 110, args) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_by_hand() -> None:
    args = OptimArgs(lr=1.0, min_lr=0.2, warmup=5, scheduler="wsd", decay_fraction=0.2)
    rates = [learning_rate(step, 100, args) for step in (5, 50, 80, 90, 100)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.2])


@pytest.mark.parametrize("scheduler", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup", [-1, 0, 1, 10, 2000])
@pytest.mark.parametrize("decay_fraction", [0.0, 0.1, 1.0])
def test_schedules_are_safe_at_their_edges(scheduler: str, steps: int, warmup: int, decay_fraction: float) -> None:
    args = OptimArgs(lr=1.0, min_lr=0.0, scheduler=scheduler, warmup=warmup, decay_fraction=decay_fraction)
    for step in range(1, steps + 2):  # one beyond the end, too
        assert 0.0 <= learning_rate(step, steps, args) <= 1.0
    warmed = max(warmup, 0) < steps and not (warmup == -1 and steps < 10)
    decays = scheduler == "cosine" or (scheduler == "wsd" and decay_fraction > 0)
    if warmed and decays and steps > 2:
        assert learning_rate(steps, steps, args) == pytest.approx(0.0)


def test_default_warmup_is_a_tenth_of_a_short_run() -> None:
    args = OptimArgs(lr=1.0)
    assert learning_rate(50, 1000, args) == pytest.approx(0.5)
    assert learning_rate(1000, 1_000_000, args) == pytest.approx(0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4, bias=False)
        self.norm = nn.RMSNorm(4)
        self.vector = nn.Parameter(torch.ones(4))

    def forward(self) -> torch.Tensor:
        return (self.norm(self.linear(self.embedding.weight)) * self.vector).square().sum()


def test_decay_falls_on_matrices_only() -> None:
    net = Net()
    decayed, others = parameter_groups(net, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(net.linear.weight)]
    assert decayed["weight_decay"] == 0.1
    assert {id(p) for p in others["params"]} == {id(net.embedding.weight), id(net.norm.weight), id(net.vector)}
    assert others["weight_decay"] == 0.0


def set_gradients(net: Net, scale: float) -> None:
    for i, parameter in enumerate(net.parameters()):
        parameter.grad = scale * (torch.arange(parameter.numel()).reshape(parameter.shape) - float(i))


@pytest.mark.parametrize(
    "changes", [{}, {"beta1": 0.6}, {"beta2": 0.7}, {"epsilon": 0.05}, {"weight_decay": 0.5}, {"weight_decay": 0.0}]
)
def test_a_step_equals_torchs_clipping_and_adamw(changes: dict[str, float]) -> None:
    torch.manual_seed(0)
    net, reference = Net(), Net()
    reference.load_state_dict(net.state_dict())
    args = OptimArgs(lr=0.1, min_lr=0.01, warmup=2, clip=0.5, **changes)
    value = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1} | changes
    optimizer = Optimizer(net, args, steps=4)
    adamw = torch.optim.AdamW(
        parameter_groups(reference, value["weight_decay"]),
        betas=(value["beta1"], value["beta2"]),
        eps=value["epsilon"],
    )
    # Some are clipped and some not: the averages of gradients of one size would be the same with any beta.
    for step, scale in enumerate((1.0, -0.001, 0.5, 0.002), 1):
        set_gradients(net, 7.0 * scale)  # a sum over 7 targets
        norm = optimizer.step(step, LossSum(torch.tensor(1.0), torch.tensor(7.0)))
        set_gradients(reference, scale)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, 4, args)
        adamw.step()
        torch.testing.assert_close(norm, expected)
        assert all(p.grad is None for p in net.parameters())
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_muon_steps_equal_torchs_two_optimizers() -> None:
    torch.manual_seed(0)
    net, reference = Net(), Net()
    reference.load_state_dict(net.state_dict())
    args = OptimArgs(lr=0.1, min_lr=0.01, warmup=2, clip=0.5, matrices="muon", muon_momentum=0.8)
    optimizer = Optimizer(net, args, steps=4)
    decayed, others = parameter_groups(reference, 0.1)
    muon = torch.optim.Muon(decayed["params"], weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([others], betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 5):
        set_gradients(net, 7.0)
        optimizer.step(step, LossSum(torch.tensor(1.0), torch.tensor(7.0)))
        set_gradients(reference, 1.0)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for part in (muon, adamw):
            part.param_groups[0]["lr"] = learning_rate(step, 4, args)
            part.step()
        assert all(p.grad is None for p in net.parameters())
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert [id(p) for p in optimizer.muon.param_groups[0]["params"]] == [id(net.linear.weight)]


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
@pytest.mark.parametrize("where", ["gradient nan", "gradient inf", "loss nan", "no targets"])
def test_a_non_finite_step_changes_nothing(where: str, matrices: str) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = Optimizer(net, OptimArgs(lr=0.1, warmup=0, matrices=matrices), steps=10)
    states = lambda: [state for part in optimizer.parts for state in part.state.values()]  # noqa: E731
    set_gradients(net, 1.0)
    optimizer.step(1, LossSum(torch.tensor(1.0), torch.tensor(1.0)))
    weights = [p.detach().clone() for p in net.parameters()]
    moments = [{k: v.clone() for k, v in state.items()} for state in states()]
    assert len(moments) == 4
    set_gradients(net, 1.0)
    loss = torch.tensor(float("nan") if where == "loss nan" else 1.0)
    if where.startswith("gradient"):
        net.linear.weight.grad[0, 0] = float(where.split()[1])
    optimizer.step(2, LossSum(loss, torch.tensor(0.0 if where == "no targets" else 1.0)))
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    for before, after in zip(moments, states(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert int(optimizer.skipped) == 1
    set_gradients(net, 1.0)
    optimizer.step(3, LossSum(torch.tensor(1.0), torch.tensor(1.0)))
    assert not torch.equal(weights[1], net.linear.weight)
    assert int(optimizer.skipped) == 1


def test_many_in_a_row_end_the_run_even_if_looked_at_later() -> None:
    net = Net()
    optimizer = Optimizer(net, OptimArgs(max_nonfinite=3), steps=10)
    for step, value in enumerate([float("nan"), 1.0, *[float("nan")] * 2, 1.0], 1):
        set_gradients(net, 1.0)
        optimizer.step(step, LossSum(torch.tensor(value), torch.tensor(1.0)))
    optimizer.check(5)  # two in a row are not three
    for step, value in enumerate([*[float("nan")] * 3, 1.0], 6):
        set_gradients(net, 1.0)
        optimizer.step(step, LossSum(torch.tensor(value), torch.tensor(1.0)))
    with pytest.raises(UserError, match=r"step 9: 3 steps in a row .* skipped \(6 in all; optim\.max_nonfinite=3\)"):
        optimizer.check(9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrices": "sgd"}, "optim.matrices=sgd: expected adamw or muon"),
        ({"muon_momentum": 1.0}, "optim.muon_momentum=1.0"),
        ({"scheduler": "linear"}, "optim.scheduler=linear: expected cosine, wsd or constant"),
        ({"min_lr": 1.0}, "optim.min_lr=1.0: expected a number between 0 and optim.lr=0.0006"),
        ({"min_lr": math.nan}, "optim.min_lr=nan"),
        *(({"lr": bad}, f"optim.lr={bad}: expected") for bad in (0.0, -1.0, math.inf, math.nan)),
        *(({beta: bad}, f"optim.{beta}={bad}") for beta in ("beta1", "beta2") for bad in (-0.1, 1.0, math.nan)),
        *(({"epsilon": bad}, f"optim.epsilon={bad}") for bad in (0.0, -1.0, math.inf, math.nan)),
        *(({"weight_decay": bad}, f"optim.weight_decay={bad}") for bad in (-0.1, math.inf, math.nan)),
        *(({"clip": bad}, f"optim.clip={bad}") for bad in (-0.1, math.inf, math.nan)),
        ({"warmup": -2}, "optim.warmup=-2"),
        ({"decay_fraction": 1.5}, "optim.decay_fraction=1.5"),
        ({"decay_fraction": math.nan}, "optim.decay_fraction=nan"),
        ({"max_nonfinite": 0}, "optim.max_nonfinite=0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        OptimArgs(**changes)
