"""The paper's numbers agree with one another, but for its errata, each of which is held against them here."""

from __future__ import annotations

import pytest

from lingua import paper
from lingua.scaling import LR_LAWS, SECOND_CROSSBERT_LR


def value(table: int, benchmark: str, setting: str, model: str, column: str) -> float:
    (found,) = [
        r for r in paper.results()
        if (r.table, r.benchmark, r.setting, r.model, r.column) == (table, benchmark, setting, model, column)
    ]  # fmt: skip
    return found.value


def test_every_value_is_there_once() -> None:
    assert len(paper.results()) == 433
    assert len({(r.table, r.benchmark, r.setting, r.model, r.column) for r in paper.results()}) == 433
    assert {r.table for r in paper.results()} == set(range(1, 10))
    assert [len(paper.suite(family)) for family in paper.FAMILIES] == [8, 9]
    assert {name: sum(types.values()) for name, types in paper.MTEB_TASKS.items()} == {
        "MTEB(eng, v1)": 56,
        "MTEB(eng, v2)": 41,
    }


def test_averages_are_the_printed_ones() -> None:
    """To rounding; all but Electra's two frozen ones on MTEB v1, which the errata name."""
    means = paper.averages()
    assert len(means) == 60
    off = {(r.table, r.benchmark, r.setting, r.model, r.column): mean for r, mean in means if abs(r.value - mean) > 0.1}
    electra = (3, "MTEB(eng, v1)", "frozen", "Electra-258M")
    assert off == {
        (*electra, "MeanTaskType"): pytest.approx(25.9, abs=0.05),
        (*electra, "MeanTask"): pytest.approx(21.9, abs=0.05),
    }
    assert "25.9 and 21.9" in paper.ERRATA["table 3, MTEB v1 frozen, Electra"]


def test_three_averages_of_table_3_are_over_tasks() -> None:
    """A mean over types would be several points from what is printed."""
    for model in ("ModernBERT-352M", "NeoBERT-198M", "DeBERTaV3-304M"):
        where = (3, "MTEB(eng, v1)", "unfrozen", model)
        types = [value(*where, column) for column in paper.MTEB]
        assert abs(sum(types) / 7 - value(*where, "MeanTask")) > 0.5


def test_tables_repeat_one_another() -> None:
    glue = ("GLUE", "linear_probe")
    assert value(1, *glue, "BERT-239M", "last") == value(3, *glue, "BERT-239M", "Avg") == 67.4
    assert value(6, *glue, "BERT-239M-mask20", "Avg") == 67.4
    assert value(2, *glue, "CrossBERT-279M", "mask50") == value(5, *glue, "CrossBERT-279M-noCMS", "Avg") == 73.1
    assert value(4, *glue, "pred-768x6-42M", "Avg") == value(5, *glue, "CrossBERT-279M-CMS", "Avg") == 73.8
    assert value(1, *glue, "BERT-1.21B", "last") == value(9, *glue, "BERT-1B*", "Avg") == 64.6


def test_errata_of_the_scaling_section() -> None:
    last, one_before = paper.suite("crossbert")[-1], paper.suite("crossbert")[-2]
    assert last["params_m"] / one_before["params_m"] > 4  # the full count, after half of it
    second = [abs(row["lr"] / SECOND_CROSSBERT_LR(row["flops"]) - 1) for row in (one_before, last)]
    assert second == [pytest.approx(0.007, abs=0.001), pytest.approx(0.052, abs=0.001)]
    first = [row["lr"] / LR_LAWS["crossbert"](row["flops"]) for row in (one_before, last)]
    assert first == [pytest.approx(1.15, abs=0.005), pytest.approx(1.20, abs=0.005)]
