"""The numbers of each figure, from known records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reports.recorded import write_run
from tests.reports.recorded_comparison import write_comparison
from tutti.records.comparison import STRONG, Combination, Comparison, ComparisonFolder
from tutti.reports.figures import FIGURES, page_figures
from tutti.reports.figures.classes import COUNTED, confusion_cells, confusion_pair
from tutti.reports.results import Results, read_comparison

Table = list[dict[str, Any]]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    write_comparison(tmp_path)
    return read_comparison(tmp_path)


def test_figures_have_distinct_places_and_the_page_begins_with_learning() -> None:
    places = [figure.place for figure in page_figures().values()]
    assert places == sorted(set(places))
    assert [*page_figures()][:2] == ["progress", "speed-up"]
    assert [*page_figures()][-2:] == ["classes", "confusion"]


def tables(results: Results, figure: str) -> list[Table]:
    """Return the tables of a figure, each once."""
    chart = FIGURES[figure].draw(results)
    assert chart is not None, f"there is no figure {figure}"
    found: list[Table] = []

    def collect(node: object) -> None:
        if isinstance(node, dict):
            data = node.get("data")
            if isinstance(data, dict) and data.get("values") not in (None, *found):
                found.append(data["values"])
            for item in node.values():
                collect(item)
        elif isinstance(node, list):
            for item in node:
                collect(item)

    collect(chart.to_dict())
    return found


def test_learning_is_drawn_against_the_time_of_training(results: Results) -> None:
    (table,) = tables(results, "progress")
    found = [row for row in table if row["way"] == "sync, 2 workers"]
    assert {(r["repeat"], r["epoch"], r["seconds"], r["accuracy"], r["loss"]) for r in found} == {
        (1, 1, 2.5, 0.5, 0.5),
        (1, 2, 5.0, 0.75, 0.25),
        (2, 1, 2.5, 0.5, 0.5),
        (2, 2, 6.0, 0.75, 0.25),
    }


def test_without_any_validation_part_the_training_part_is_drawn(tmp_path: Path) -> None:
    one = Combination("solo, 1 thread", "one", "solo", 1, 1, STRONG)
    write_run(ComparisonFolder(tmp_path).run(one, 0).path, [(2.0, None)])
    ComparisonFolder(tmp_path).write(Comparison("mlp", "digits", 1, None, (one,)))
    results = read_comparison(tmp_path)
    (table,) = tables(results, "progress")
    assert [(row["accuracy"], row["loss"]) for row in table] == [(0.25, 0.5)]
    assert "training accuracy" in str(FIGURES["progress"].draw(results).to_dict())


@pytest.mark.parametrize(("place", "seconds"), [(0, (5.0, 6.0, 5.5)), (1, (4.0, 5.0, 4.5))])
def test_the_figure_has_the_speed_up_of_the_table_and_its_spread(
    results: Results, place: int, seconds: tuple[float, float, float]
) -> None:
    strong_and_weak = [table for table in tables(results, "speed-up") if "way" in table[0]]
    row = next(row for row in strong_and_weak[place] if row["way"] == "sync")
    shortest, longest, middle = seconds
    assert row["cores"] == 2
    assert row["speed-up"] == pytest.approx(8.5 / middle)
    assert row["efficiency"] == pytest.approx(8.5 / middle / 2)
    assert (row["least"], row["most"]) == pytest.approx((8.5 / longest, 8.5 / shortest))


def test_the_stages_add_up_over_ranks_and_epochs(results: Results) -> None:
    summed, single = tables(results, "stages")
    expected = {"data": 1.0, "forward": 2.0, "backward": 1.5, "wait": 0.5, "validation": 2.0}
    for rank in range(2):
        found = [row for row in single if row["way"] == f"sync, 2 workers: rank {rank}"]
        assert {row["stage"]: row["seconds"] for row in found} == expected
    found = [row for row in summed if row["way"] == "sync, 2 workers"]
    assert {row["stage"]: row["seconds"] for row in found} == {k: 2 * s for k, s in expected.items()}
    assert sum(row["share"] for row in found) == pytest.approx(1.0)


def test_staleness_is_counted_over_ranks_epochs_and_repeats(results: Results) -> None:
    (table,) = tables(results, "staleness")
    found = [row for row in table if row["way"] == "sync, 2 workers"]
    assert [(row["updates"], row["share"]) for row in found] == [(0, 0.75), (1, 0.25)]
    assert "solo, 1 thread" not in {row["way"] for row in table}


def test_the_load_of_cores_is_drawn_for_one_process_and_the_fastest_parallel_way(results: Results) -> None:
    alone, together = tables(results, "cores")
    assert [(row["core"], row["seconds"], row["busy"]) for row in alone] == [
        ("core 0", 0.0, 90.0),
        ("core 1", 0.0, 5.0),
        ("core 0", 4.0, 90.0),
        ("core 1", 4.0, 5.0),
    ]
    assert [row["busy"] for row in together] == [90.0] * 4
    titles = [panel["title"] for panel in FIGURES["cores"].draw(results).to_dict()["hconcat"]]
    assert titles == ["solo, 1 thread", "sync, 2 workers, weak"]


def test_memory_is_the_peak_of_each_rank(results: Results) -> None:
    (table,) = tables(results, "memory")
    found = [row for row in table if row["way"] == "sync, 2 workers"]
    assert [(row["rank"], row["memory"]) for row in found] == [("rank 0", 164.0), ("rank 1", 164.0)]


def test_the_accuracy_of_each_class_is_its_share_of_right_predictions(results: Results) -> None:
    (table,) = tables(results, "classes")
    found = [row for row in table if row["way"] == "solo, 1 thread"]
    assert [(row["class"], row["accuracy"]) for row in found] == [("cat", 0.9), ("dog", 0.7)]


def test_the_confusion_matrix_counts_the_predicted_classes(results: Results) -> None:
    (table,) = tables(results, "confusion")
    found = [row for row in table if row["way"] == "solo, 1 thread"]
    assert [(row["true class"], row["predicted as"], row["samples"], row["share"]) for row in found] == [
        ("cat", "cat", 9, 0.9),
        ("cat", "dog", 1, 0.1),
        ("dog", "cat", 3, 0.3),
        ("dog", "dog", 7, 0.7),
    ]


def test_a_class_without_samples_has_its_row_and_column() -> None:
    cells, order = confusion_cells("solo", ("cat", "dog", "cow"), [[2, 1, 0, 0], [1, 1, 0, 1], [0] * 4])
    chart = confusion_pair(cells, order, ["solo"]).to_dict()
    encoding = chart["hconcat"][0]["layer"][0]["encoding"]
    assert encoding["x"]["scale"]["domain"] == ["cat", "dog", "cow", "no class"]
    assert encoding["y"]["scale"]["domain"] == ["cat", "dog", "cow"]


def test_cells_show_numbers_of_samples_for_few_classes() -> None:
    labels = tuple(f"class {number}" for number in range(COUNTED + 1))
    for count, numbered in ((COUNTED, True), (COUNTED + 1, False)):
        matrix = [[3.0 * (row == column) for column in range(count)] for row in range(count)]
        chart = confusion_pair(*confusion_cells("solo", labels, matrix), ["solo"])
        assert ("'type': 'text'" in str(chart.to_dict())) == numbered
