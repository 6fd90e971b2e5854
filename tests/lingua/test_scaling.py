"""Laws and fits: SciPy's robust regression, exponents that are known, the paper's own rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import least_squares

from lingua import paper
from lingua.errors import UserError
from lingua.scaling import (
    HUBER,
    depth_law,
    fit_power_law,
    head_size,
    huber_lines,
    parabola,
    predictor_layers,
    shape_of,
    widths,
)


def test_the_robust_line_is_scipys() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 5, 12)
    y = 1.5 - 0.7 * x + 0.1 * rng.standard_normal(12)
    y[3] += 4.0
    ours = huber_lines(x, y, rounds=200)
    left = y - ours.intercept - ours.slope * (x - x.mean())
    scale = np.median(np.abs(left)) / 0.6745 * np.sqrt(12 / 10)
    theirs = least_squares(lambda p: p[0] + p[1] * x - y, [0, 0], loss="huber", f_scale=HUBER * scale, xtol=1e-14)
    assert ours.slope == pytest.approx(theirs.x[1], abs=1e-5)
    plain = np.polyfit(x, y, 1)[0]
    assert abs(ours.slope + 0.7) < 0.05 < abs(plain + 0.7)


def test_many_lines_at_once_are_the_same_as_one_by_one() -> None:
    rng = np.random.default_rng(1)
    x, y = np.arange(7.0), rng.standard_normal((5, 7))
    together = huber_lines(x, y)
    for i, row in enumerate(y):
        alone = huber_lines(x, row)
        assert [values[i] for values in together] == pytest.approx([float(value) for value in alone])


def test_intervals_hold_the_exponent_as_often_as_they_say() -> None:
    """1,000 made-up sets of 8 points around a known law, of which 95% should lie inside; bars fixed at 90% and 99%."""
    rng = np.random.default_rng(2)
    x = np.logspace(18, 21, 8)
    inside = 0
    for i in range(1000):
        y = 69.0 * x**-0.24 * np.exp(0.05 * rng.standard_normal(8))
        fit = fit_power_law(list(x), list(y), resamples=199, seed=i)
        inside += fit.low <= -0.24 <= fit.high
    assert 900 <= inside <= 990


def test_a_law_without_noise_comes_back() -> None:
    x = [1e12, 1e13, 1e14, 1e15]
    fit = fit_power_law(x, [3.0 * c**0.3 for c in x])
    assert (fit.law.constant, fit.law.exponent) == pytest.approx((3.0, 0.3))
    assert fit.spread == pytest.approx(0, abs=1e-9)
    assert fit.low == pytest.approx(0.3) == fit.high
    assert fit.off(1e16, 6.0 * 1e16**0.3) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("family", "column", "ids", "exponent"),
    [
        ("bert", "batch_tokens", range(8), 0.24),
        ("bert", "lr", range(8), -0.24),
        ("crossbert", "batch_tokens", range(9), 0.101),
        ("crossbert", "lr", range(7), -0.279),
    ],
)
def test_the_papers_rows_give_its_exponents(family: str, column: str, ids: range, exponent: float) -> None:
    rows = [row for row in paper.suite(family) if row["id"] in ids]
    assert len(rows) == len(ids)
    fit = fit_power_law([row["flops"] for row in rows], [row[column] for row in rows])
    assert fit.law.exponent == pytest.approx(exponent, abs=0.01)
    assert fit.low < fit.law.exponent < fit.high


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1e18, 1e18], [1.0, 2.0], "two budgets at least, found 1"),
        ([1e18, 1e19], [1.0, float("nan")], "finite values above 0"),
        ([1e18, 1e19], [1.0, 0.0], "finite values above 0"),
    ],
)
def test_what_cannot_be_fitted(x: list[float], y: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_power_law(x, y)


def test_few_points_have_no_interval() -> None:
    fit = fit_power_law([1.0, 10.0, 100.0], [1.0, 2.0, 4.0])
    assert (fit.low, fit.high, fit.points) == (None, None, 3)


def test_parabolas_by_hand() -> None:
    """3 + (ln(x / 20))^2 has its minimum of 3 at 20."""
    x = [5.0, 10.0, 20.0, 40.0]
    found = parabola(x, [3 + np.log(v / 20) ** 2 for v in x])
    assert (found.best, found.loss) == pytest.approx((20.0, 3.0))
    assert "lies outside" in parabola([1.0, 2.0, 4.0], [3 + np.log(v / 20) ** 2 for v in (1, 2, 4)]).why
    assert parabola([1.0, 2.0, 4.0], [1.0, 2.0, 1.0]).why == "the losses have no minimum"
    assert parabola([1.0, 2.0], [1.0, 2.0]).best is None


@pytest.mark.parametrize("family", paper.FAMILIES)
def test_rules_against_every_row_of_the_suites(family: str) -> None:
    prefix = {"bert": "", "crossbert": "enc_"}[family]
    errors = []
    for row in paper.suite(family):
        dim, layers = row[f"{prefix}dim"], row["n_layers" if family == "bert" else "enc_layers"]
        assert head_size(dim) == row[f"{prefix}head_dim"]
        shape = shape_of(family, dim, n_layers=layers)
        assert shape.n_heads == row[f"{prefix}heads" if prefix else "n_heads"]
        if family == "crossbert":
            assert shape.pred_layers == predictor_layers(layers) == row["pred_layers"]
        assert dim in widths()
        errors.append(abs(layers / depth_law(family).law(dim) - 1))
    assert max(errors) == pytest.approx(depth_law(family).spread)
    assert max(errors) < 0.17
