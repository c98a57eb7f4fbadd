"""The corrected t-test and Holm's adjustment give published numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tutti.errors import BadData
from tutti.studies.cross_validation.result import CrossValidated
from tutti.studies.cross_validation.scores import FoldScores
from tutti.studies.cross_validation.significance import compare, corrected_test, holm
from tutti.studies.score import Score

MOONS = {
    "linear": (
        "yvtxzyyzxzxyywuyzzuzvyvzzyvwzzvxvzyzzxwzyxzxztzxzzzuyyzryxzzxxzuvwyxyzywuvzyzxxxyzxzrzzzztyxztxzxxzv"
    ),
    "poly, degree 2": (
        "tqoshrtzsqpoyqsftsswrvquqotnmztwntmrvnsrovtfpgmrtzujvxusnswrloxvosxmwtuqpttrtiusxusvqtuulprpwnmrrtvn"
    ),
    "poly, degree 3": (
        "zstxzwyvyyxwztuyzztzvxuuzyvxxzwxtzyyzvwzwuzyxpxxzzxuzyztuuzzwxyxvtzyvzywuwzyzryvyvxztzyzzsxxzryzyxzo"
    ),
    "rbf": (
        "xstxzzzzyzyzzxvxzzuzuxwxzzwxzzuyvzzzzyxzzxzxztzzzzzvzzzsxzzzxxzzuwzxyzyxvxzzzwxxzxyzszzzztywzsxzyzzv"
    ),
}
"""The scores of scikit-learn's example "Statistical comparison of models using grid search": the areas under
the curves of 10 repeats of 10 folds of 100 samples, in 25ths from a = 0 to z = 1."""


def scores(*folds, metric="accuracy"):
    return FoldScores(Score.read(metric), tuple(map(float, folds)))


def moons():
    return {name: scores(*((ord(letter) - ord("a")) / 25 for letter in text)) for name, text in MOONS.items()}


def test_the_test_gives_the_numbers_of_scikit_learns_example():
    found = {(one.first, one.second): one for one in compare(moons(), [10 / 90] * 100)}
    printed = {
        ("linear", "rbf"): 0.750,
        ("poly, degree 3", "rbf"): 1.657,
        ("poly, degree 2", "rbf"): 4.565,
        ("linear", "poly, degree 3"): 1.111,
        ("linear", "poly, degree 2"): 4.276,
        ("poly, degree 2", "poly, degree 3"): 3.851,
    }
    assert {pair: round(abs(one.mean / one.error), 3) for pair, one in found.items()} == printed
    one = found["linear", "rbf"]
    assert round(one.p / 2, 3) == 0.227  # printed of one side
    (alone,) = compare({name: moons()[name] for name in ("linear", "rbf")}, [10 / 90] * 100)
    assert tuple(round(-end, 6) for end in reversed(alone.interval)) == (-0.016445, 0.036445)
    assert found["poly, degree 2", "rbf"].better == "rbf"
    assert found["poly, degree 2", "rbf"].sentence.startswith("rbf is better than poly, degree 2 by ")
    assert "p < 0.001 (adjusted for 6 comparisons)" in found["poly, degree 2", "rbf"].sentence
    assert one.better is None
    assert one.sentence.startswith(
        "no significant difference between rbf and linear: 1.00 points, 95 % interval -1.74 to 3.74, p = 0.5"
    )


def test_an_interval_excludes_0_exactly_if_the_difference_is_significant():
    candidates = {
        "a": scores(0.90, 0.92, 0.91, 0.93),
        "b": scores(0.88, 0.89, 0.90, 0.90),
        "c": scores(0.86, 0.85, 0.88, 0.88),
        "d": scores(0.70, 0.73, 0.71, 0.73),
    }
    found = compare(candidates, [1 / 3] * 4)
    assert {one.better is None for one in found} == {True, False}
    assert any(one.better is None and one.p < 0.05 for one in found)  # significant without the adjustment
    for one in found:
        low, high = one.interval
        assert (one.better is not None) == (low > 0 or high < 0)
        # The share outside of the interval is its level.
        outside = 2 * stats.t(3).sf((high - one.mean) / one.error)
        assert outside == pytest.approx(0.05 * one.p / one.adjusted, rel=1e-9)


def test_the_variance_is_that_of_nadeau_and_bengio():
    differences = [0.01, 0.03, -0.02, 0.04, 0.02]
    error, p = corrected_test(differences, 0.25)
    assert error**2 == pytest.approx((1 / 5 + 1 / 4) * np.var(differences, ddof=1), rel=1e-12)
    assert p == pytest.approx(2 * stats.t(4).sf(0.016 / error), rel=1e-12)
    # Without the correction it is the paired t-test.
    plain = stats.ttest_1samp(differences, 0)
    assert corrected_test(differences, 0)[1] == pytest.approx(plain.pvalue, rel=1e-12)


def test_holms_adjustment_gives_known_numbers():
    # The first is the example of Wikipedia's article; statsmodels gives the same for all.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02, 0.02, 0.5]) == pytest.approx([0.06, 0.06, 0.5])
    assert holm([0.0001, 0.6, 0.7, 0.2, 0.049, 0.051]) == pytest.approx([0.0006, 1.0, 1.0, 0.6, 0.245, 0.245])
    assert holm([0.04]) == [0.04]
    assert holm([]) == []
    found = holm([0.01, math.nan, 0.04])
    assert found[0::2] == pytest.approx([0.02, 0.04])
    assert math.isnan(found[1])


def test_the_better_candidate_is_named_in_any_order_and_for_any_metric():
    high, low = scores(0.9, 0.92, 0.91, 0.93, 0.9), scores(0.8, 0.81, 0.82, 0.83, 0.81)
    for candidates in ({"cosine": high, "warm": low}, {"warm": low, "cosine": high}):
        (one,) = compare(candidates, [0.25] * 5)
        assert one.better == "cosine"
        assert one.sentence.startswith("cosine is better than warm by 9.80 points, 95 % interval 8.")
        assert "adjusted" not in one.sentence
    of_errors = {name: scores(*one.folds, metric="mae") for name, one in (("cosine", high), ("warm", low))}
    (one,) = compare(of_errors, [0.25] * 5)
    assert one.better == "warm"
    assert "warm is better than cosine by 0.098 in mae, 95 % interval 0.08" in one.sentence


def compared(one, other):
    (found,) = compare({"a": one, "b": other}, [0.25] * len(one.folds))
    return found


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ((0.8, 0.9, 0.7), (0.8, 0.9, 0.7), r"they differ by the same 0\.00 points in each fold"),
        ((0.8, 0.9, 0.7), (0.75, 0.85, 0.65), r"they differ by the same 5\.00 points in each fold"),
        ((0.1 + 0.2, 0.9, 0.7), (0.3, 0.9, 0.7), r"the same 0\.00 points"),
        ((0.0, 0.0), (0.0, 0.0), r"the same 0\.00 points"),
        ((0.8,), (0.7,), "the scores of 1 folds, and a test needs two"),
        ((0.8, math.nan), (0.7, 0.9), "the scores of 1 folds"),
        ((math.nan, 0.8), (0.7, math.nan), "the scores of 0 folds"),
    ],
)
def test_equal_differences_and_missing_scores_give_no_p(one, other, said):
    found = compared(scores(*one), scores(*other))
    assert all(map(math.isnan, (found.p, found.adjusted, *found.interval)))
    assert found.better is None
    assert re.search(f"a and b cannot be compared: .*{said}", found.sentence)


def test_folds_without_a_score_are_left_out_of_both():
    whole, part = scores(0.8, 0.9, 0.7, 0.85), scores(0.7, 0.85, 0.65, 0.82)
    found = compared(scores(0.8, 0.9, 0.1, 0.7, 0.85), scores(0.7, 0.85, math.nan, 0.65, 0.82))
    wanted = compared(whole, part)
    assert (found.folds, found.p, found.mean) == (4, wanted.p, wanted.mean)


def test_the_sentence_for_two_folds_has_no_interval():
    found = compared(scores(0.8, 0.9), scores(0.7, 0.7))
    assert found.p == pytest.approx(2 * stats.t(1).sf(found.mean / found.error))
    expected = "no significant difference between a and b: 15.00 points, p = 0.247, of 2 folds only"
    assert found.sentence == expected


def test_a_pair_without_a_test_does_not_count_in_the_adjustment():
    candidates = {"a": scores(0.9, 0.92, 0.95), "b": scores(0.9, 0.92, 0.95), "c": scores(0.5, 0.55, 0.6)}
    same, *others = compare(candidates, [0.5] * 3)
    assert math.isnan(same.adjusted)
    assert {one.pairs for one in others} == {2}
    assert [one.adjusted for one in others] == pytest.approx([2 * one.p for one in others])


def test_unequal_folds_use_the_mean_of_their_ratios():
    one, other = scores(0.8, 0.9, 0.7), scores(0.7, 0.85, 0.68)
    (found,) = compare({"a": one, "b": other}, [0.5, 0.4, 0.6])
    assert found.p == corrected_test([a - b for a, b in zip(one.folds, other.folds, strict=True)], 0.5)[1]


def test_scores_of_other_folds_are_refused():
    with pytest.raises(BadData, match="b has the scores of 3 folds, and there are 2"):
        compare({"a": scores(0.1, 0.2), "b": scores(0.1, 0.2, 0.3)}, [0.5] * 2)


def test_candidates_that_do_not_differ_significantly_from_the_best_are_ties():
    found = CrossValidated(moons(), compare(moons(), [10 / 90] * 100), {}, Path())
    assert found.ties == ["rbf", "linear", "poly, degree 3"]
    assert found.verdict.startswith("best mean: rbf, 94.00%. A tie")


def test_many_comparisons_are_shown_only_with_the_best_candidate():
    many = {**moons(), "again": moons()["linear"]}
    shown = str(CrossValidated(many, compare(many, [10 / 90] * 100), {}, Path()))
    assert shown.count("no significant difference ") + shown.count(" is better than ") == 4
    assert shown.endswith("\n6 further comparisons are in compare.csv")
