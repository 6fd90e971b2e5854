"""Tables and pictures of results made by hand."""

from __future__ import annotations

from typing import Any

from lingua.evaluation.results import draw_layers, draw_samples, results_table, score_of, shown_scores


def made_up(rows: int, full: bool = True, step: int | None = 1200) -> dict[str, Any]:
    """Results of one task at layers 0 and 4, in which every score tells where it stands."""

    def entry(layer: int, place: int) -> dict[str, Any]:
        return {"k": 1, "accuracy": (layer + place) / 16, "f1": 0.5}

    layers = {
        str(layer): {
            "knn": {
                "paper": entry(layer, 3),
                "honest": entry(layer, 2),
                "full": entry(layer, 4) if full else None,
                "samples": [
                    {"size": 1, "seed": 0, "rows": 1, "paper": entry(layer, 0), "honest": None},
                    {"size": 1, "seed": 1, "rows": 1, "paper": entry(layer, 1), "honest": None},
                    {"size": 100, "seed": 0, "rows": 90, "paper": entry(layer, 3), "honest": entry(layer, 2)},
                ],
            }
        }
        for layer in (0, 4)
    }
    task = {
        "metric": "accuracy",
        "metrics": ["accuracy", "f1"],
        "train": {"rows": rows},
        "majority": {"accuracy": 0.25, "f1": 0.0},
        "layers": layers,
    }
    return {
        "model": "Bert",
        "checkpoint": "runs/x/checkpoints/0000001200",
        "step": step,
        "random_init": False,
        "layers": [0, 4],
        "tasks": {"toy": task},
        "config": {"probe": {"kinds": ["knn"], "max_samples": 100, "full": full}},
        "glue_average": None,
    }


def test_a_table_for_each_score() -> None:
    table = results_table(made_up(rows=500))
    assert table.startswith("Bert, step 1,200, runs/x/checkpoints/0000001200. Scores x 100.\n")
    assert (
        "knn, `paper`: the best of the grid on the evaluation rows, as the paper reports.\n\n"
        "| layer    | toy accuracy | toy f1 |\n| :------- | -----------: | -----: |\n"
        "| 0        |         18.8 |   50.0 |\n| 4        |         43.8 |   50.0 |\n"
        "| majority |         25.0 |    0.0 |\n" in table
    )
    assert "| 4        |         37.5 |" in table.split("`honest`")[1]
    assert "| 4        |         50.0 |" in table.split("`full`")[1]


def test_full_is_shown_where_it_says_more() -> None:
    assert shown_scores(made_up(rows=500)) == ["paper", "honest", "full"]
    assert shown_scores(made_up(rows=90)) == ["paper", "honest"]
    assert shown_scores(made_up(rows=500, full=False)) == ["paper", "honest"]
    assert "`full`" not in results_table(made_up(rows=90))


def test_the_origin_is_told() -> None:
    assert results_table(made_up(9) | {"random_init": True}).startswith("Bert, untrained weights, runs/x")
    assert results_table(made_up(9, step=None) | {"model": "a/b"}).startswith("a/b, from Hugging Face. Scores")


def test_one_score() -> None:
    assert score_of(made_up(9), "toy", 4, "knn", "paper") == 43.75
    assert score_of(made_up(9), "toy", 4, "knn", "paper", "f1") == 50.0


def test_pictures_show_layers_and_means_over_seeds(monkeypatch: Any) -> None:
    shown: dict[str, Any] = {}
    from lingua.evaluation import results as module

    draw = module.draw_panels
    monkeypatch.setattr(module, "draw_panels", lambda *given: shown.update(given=given) or draw(*given))
    assert draw_layers(made_up(500)).startswith(b"\x89PNG")
    panels, x_label, scale = shown["given"]
    assert (list(panels), x_label, scale) == (["toy (accuracy)"], "layer (0: embedding)", "linear")
    assert [(label, x, y) for label, x, y, _ in panels["toy (accuracy)"]] == [
        ("knn, paper", [0.0, 4.0], [18.75, 43.75]),
        ("knn, honest", [0.0, 4.0], [12.5, 37.5]),
        ("knn, full", [0.0, 4.0], [25.0, 50.0]),
    ]
    assert draw_samples(made_up(500)).startswith(b"\x89PNG")
    panels, _, scale = shown["given"]
    assert scale == "log"
    lines = {label: (x, y) for label, x, y, _ in panels["toy (accuracy), layer 4"]}
    assert lines == {"knn, paper": ([1.0, 90.0], [28.125, 43.75]), "knn, honest": ([90.0], [37.5])}
