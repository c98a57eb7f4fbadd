"""The estimators.

They follow scikit-learn's conventions: `__init__` keeps its arguments unchanged, `fit` checks the data, and
attributes that end with an underscore exist after it. Arrays, and tables of numbers alone, become floats and
are not scaled; other tables are prepared as in `tutti.train`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from typing import Any, Final, Self, cast

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _check_y,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.shm.communicator import HostCommunicator
from tutti.data.arrays import float_dtype, keeping_doubles
from tutti.data.formats.arrow_columns import kind_of
from tutti.data.formats.arrow_tables import arrow_table, is_frame
from tutti.data.parts import Part
from tutti.errors import BadModel
from tutti.records.preparation import NUMBER
from tutti.run.api import train
from tutti.run.config import Options
from tutti.run.trained import TrainedModel
from tutti.strategies import Strategy
from tutti.training.precision import FP32, Arithmetic
from tutti.training.prediction import predict

Array = NDArray[Any]

OWN: Final = ("model", "random_state", "verbose")
"""The parameters that are not simply passed on to `tutti.train`."""

_LARGE: Final = 20.0
"""The largest deviation of a column of numbers without a warning."""

OF_OPTIONS: Final = "_options__"
"""Joins a part and one of its options in the name of a parameter: model_options__hidden."""


class Estimator(BaseEstimator):  # type: ignore[misc]
    """The base of the estimators.

    A parameter means the same as the argument of `tutti.train` of that name; None is the default there.
    Options of a part are parameters, too: `set_params(model_options__hidden=[64])`, or
    `model_options__hidden` in the grid of a search.

    Args:
        model: a name, an `nn.Module` (each fit begins with its weights and leaves them unchanged), or a
            function or class that makes one and takes `shape` (of one sample) and `outputs`.
        model_options: of the model, such as {"hidden": [64, 32]}.
        loss: a name or a function; "auto" is cross entropy for classes, the squared error for numbers.
        optimizer: a name of `torch.optim`, a class, or a function; by default adam.
        optimizer_options: of the optimizer, such as {"weight_decay": 1e-4}.
        lr: learning rate; by default the optimizer's own.
        schedule: a name of `torch.optim.lr_scheduler`, or a function; stepped after each update.
        schedule_options: of the schedule.
        epochs: passes over the samples; 20 if neither epochs nor steps are given.
        steps: weight updates, instead of epochs.
        batch_size: samples behind one weight update; 32, unless the model has its own default.
        clip_norm: largest 2-norm of the gradient.
        validation: share of the samples set aside, to validate on after each epoch.
        monitor: the figure that decides which epoch is the best, such as "val_loss" or "validation accuracy".
        patience: end after this number of epochs without a better one.
        goal: end when a figure is at least as good, such as "accuracy 0.97"; a number: of the monitored one.
        restore_best: end with the weights of the best epoch.
        strategy: how several workers train together.
        strategy_options: of the strategy.
        workers: how many ranks train. One trains in this process; several are further processes.
        threads: of each rank. By default one worker uses the threads of torch in this process, which
            joblib divides over its processes; several divide the cores.
        precision: arithmetic of forward and backward: "fp32", "bf16", "fp16" or "fp64".
        device: "cpu" or "cuda".
        random_state: decides the initial weights, the validation part and the order of the samples. A whole
            number is the seed of `tutti.train`.
        verbose: print what `tutti.train` prints.

    Attributes:
        module_: the trained model.
        history_: one record for each epoch.
        summary_: the totals.
        n_features_in_: the number of features of a sample; for images, of channels.
        feature_names_in_: their names, if the inputs were a data frame.
    """

    def __init__(
        self,
        model: str | nn.Module | Callable[..., nn.Module] = "mlp",
        *,
        model_options: Options | None = None,
        loss: str | Callable[..., Tensor] = "auto",
        optimizer: str | Callable[..., Optimizer] | None = None,
        optimizer_options: Options | None = None,
        lr: float | None = None,
        schedule: str | Callable[..., Any] | None = None,
        schedule_options: Options | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        clip_norm: float | None = None,
        validation: float = 0.0,
        monitor: str | None = None,
        patience: int | None = None,
        goal: float | str | None = None,
        restore_best: bool = False,
        strategy: str | Strategy | None = None,
        strategy_options: Options | None = None,
        workers: int | str = 1,
        threads: int | None = None,
        precision: str = "fp32",
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.model_options = model_options
        self.loss = loss
        self.optimizer = optimizer
        self.optimizer_options = optimizer_options
        self.lr = lr
        self.schedule = schedule
        self.schedule_options = schedule_options
        self.epochs = epochs
        self.steps = steps
        self.batch_size = batch_size
        self.clip_norm = clip_norm
        self.validation = validation
        self.monitor = monitor
        self.patience = patience
        self.goal = goal
        self.restore_best = restore_best
        self.strategy = strategy
        self.strategy_options = strategy_options
        self.workers = workers
        self.threads = threads
        self.precision = precision
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    @override
    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name.

        Args:
            deep: include each option of a part.
        """
        params: dict[str, Any] = super().get_params(deep)
        if deep:
            tables = {name: value for name, value in params.items() if isinstance(value, dict)}
            params |= {f"{name}__{key}": one for name, table in tables.items() for key, one in table.items()}
        return params

    @override
    def set_params(self, **params: Any) -> Self:
        """Set parameters, or further options of a part: `model_options__hidden=[64]`."""
        options = {name: value for name, value in params.items() if OF_OPTIONS in name}
        super().set_params(**{name: value for name, value in params.items() if name not in options})
        for name, value in options.items():
            table, _, key = name.partition("__")
            super().set_params(**{table: {**(getattr(self, table, None) or {}), key: value}})
        return self

    def _checked(self, X: Any, y: Any, **of_targets: bool) -> tuple[Any, Array]:
        """Return the samples (a table unchanged) and the targets."""
        if not _is_mixed(X):
            return cast(
                "tuple[Any, Array]", validate_data(self, X, y, **of_targets, **_inputs(self.precision))
            )
        validate_data(self, X, skip_check_array=True)
        targets = _check_y(y, **of_targets, estimator=self)
        check_consistent_length(X, targets)
        return X, targets

    def _train(self, inputs: Any, targets: Array, loss: str, options: Options, weights: Array | None) -> None:
        """Train a new model by this loss, unless a parameter names another."""
        params = {name: value for name, value in self.get_params(deep=False).items() if name not in OWN}
        if params["loss"] == "auto":
            params["loss"] = loss
        if params["threads"] is None and str(self.workers) == "1":
            params["threads"] = torch.get_num_threads()
        params = {name: _plain(value) for name, value in params.items() if value is not None}
        if loss == "cross_entropy":
            params["metrics"] = "accuracy"  # An AUC in each epoch would sort all outputs.
        data: object
        if _is_mixed(inputs):
            data, options = _as_table(inputs, targets, weights, options)
        else:
            _warn_of_sizes(inputs)
            # Tensors keep the order of their dimensions.
            data = torch.from_numpy(inputs), torch.from_numpy(targets)
            params |= {} if weights is None else {"sample_weight": weights}
        model = deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model
        result = train(model, data, data_options=options, seed=self._seed(), quiet=not self.verbose, **params)
        self.module_, self.history_, self.summary_ = result.model.eval(), result.history, result.summary
        self._run = (result.config, result.data) if _is_mixed(inputs) else None

    def _seed(self) -> int:
        random = check_random_state(self.random_state)
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(random.randint(np.iinfo(np.int32).max))

    def _outputs(self, X: Any) -> Tensor:
        """Compute the outputs of the model, as float64."""
        check_is_fitted(self)
        if self._run is not None:
            validate_data(self, X, reset=False, skip_check_array=True)
            trained = TrainedModel(*self._run, self.device, self.module_).eval()
            return torch.from_numpy(trained.outputs(X)).double()
        inputs = torch.from_numpy(validate_data(self, X, reset=False, **_inputs(self.precision)))
        arithmetic = Arithmetic(self.precision, device=self.device)
        module = self.module_ if arithmetic == FP32 else arithmetic.prepare(deepcopy(self.module_))
        with closing(HostCommunicator.alone()) as comm:
            outputs = predict(module, Part(inputs, torch.zeros(len(inputs))), comm, arithmetic)
        assert outputs is not None, "rank 0 has them"
        return outputs.double()

    @override
    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if "module_" in state:  # Its class may be defined in a notebook.
            state = {**state, "module_": cloudpickle.dumps(self.module_)}
        return state

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        if "module_" in state:
            state = {**state, "module_": cloudpickle.loads(state["module_"])}
        super().__setstate__(state)


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A classifier.

    The arguments and attributes of `Estimator`, and:

    Attributes:
        classes_: the labels, numbers or texts, sorted, as the model's outputs are.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new model.

        Args:
            X: inputs of shape (samples, features), or of further dimensions for models that take them; or a
                table of pandas, polars or pyarrow, also with texts, dates and gaps.
            y: a label for each sample.
            sample_weight: a weight for each sample in the loss, of shape (samples,); None: all count alike.

        Raises:
            ValueError: the data cannot be used.
            UserError: a parameter cannot be used; the message says what to do.
        """
        inputs, labels = self._checked(X, y)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        options: Options = {"classes": len(self.classes_)}
        self._train(inputs, numbers, "cross_entropy", options, _checked_weights(sample_weight, inputs))
        return self

    def predict_proba(self, X: Any) -> Array:
        """Compute the probability of each class, of shape (samples, classes): the softmax of the outputs."""
        outputs: Array = self._logits(X).softmax(1).numpy()
        return outputs

    def predict(self, X: Any) -> Array:
        """Return the most probable label of each sample."""
        numbers = self._logits(X).argmax(1).numpy()
        labels: Array = self.classes_[numbers]
        return labels

    def _logits(self, X: Any) -> Tensor:
        """Compute the outputs of the model, one for each class."""
        outputs, classes = self._outputs(X), len(self.classes_)
        if outputs.shape[1:] != (classes,):
            raise BadModel(
                f"the model gives outputs of shape {tuple(outputs.shape[1:])} for each sample, and y had "
                f"{classes} classes in fit; give a model with one output for each"
            )
        return outputs


class Regressor(MultiOutputMixin, RegressorMixin, Estimator):  # type: ignore[misc]
    """A regressor of one or several numbers for each sample.

    The arguments and attributes of `Estimator`. With the loss "auto" numbers are standardised for training:
    the losses of `history_` are of those; predictions and scores are in the numbers' own units.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new model.

        Args:
            X: inputs of shape (samples, features), or of further dimensions for models that take them; or a
                table of pandas, polars or pyarrow, also with texts, dates and gaps.
            y: numbers, of shape (samples,) or (samples, outputs).
            sample_weight: a weight for each sample in the loss, of shape (samples,); None: all count alike.

        Raises:
            ValueError: the data cannot be used.
            UserError: a parameter cannot be used; the message says what to do.
        """
        inputs, targets = self._checked(X, y, multi_output=True, y_numeric=True)
        weights = _checked_weights(sample_weight, inputs)
        self._shape, floats = targets.shape[1:], _inputs(self.precision)["dtype"]
        self._mean, self._std = np.zeros(self._shape), np.ones(self._shape)
        if self.loss == "auto" and not is_frame(inputs):  # else `train` sees to it
            targets = targets.astype(np.float64)
            self._mean = np.average(targets, 0, weights)
            deviations = np.sqrt(np.average((targets - self._mean) ** 2, 0, weights))
            self._std = np.where(deviations > 0, deviations, 1.0)
        targets = ((targets - self._mean) / self._std).astype(floats)
        self._train(inputs, targets, "mse", {"classes": "none"}, weights)
        return self

    def predict(self, X: Any) -> Array:
        """Compute the numbers for each sample, of the same shape as in `fit`."""
        outputs: Array = self._outputs(X).reshape(-1, *self._shape).numpy()
        return outputs * self._std + self._mean


def _inputs(precision: str) -> dict[str, Any]:
    """Return options of `validate_data` for inputs."""
    with keeping_doubles(precision == "fp64"):
        return {"dtype": float_dtype(), "order": "C", "allow_nd": True, "force_writeable": True}


def _is_mixed(X: object) -> bool:
    """Return whether samples are a table with more than numbers in it, such as texts or gaps."""
    if not is_frame(X):
        return False
    table = arrow_table(X)
    numbers = all(kind_of(field.type) == NUMBER for field in table.schema)
    return not numbers or any(column.null_count for column in table.columns)


def _checked_weights(weights: Any, X: Any) -> Array | None:
    if weights is None:
        return None
    checked = cast("Array", _check_sample_weight(weights, X, dtype=np.float64, ensure_non_negative=True))
    if not checked.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return checked


def _warn_of_sizes(inputs: Array) -> None:
    """Warn of columns whose values are far from the range that networks are made for."""
    if inputs.ndim == 2 and len(inputs) > 1 and (largest := float(inputs.std(0).max())) > _LARGE:
        warnings.warn(
            f"a column of X has a deviation of {largest:.3g}, and columns of numbers are taken as they are; "
            "put a StandardScaler before the network",
            stacklevel=4,
        )


def _as_table(frame: Any, targets: Array, weights: Array | None, options: Options) -> tuple[object, Options]:
    """Return a table with columns for targets and weights, and the options that name them."""
    table, goals = arrow_table(frame), []
    options = {**options, "columns": table.column_names}
    for number, goal in enumerate(targets.reshape(len(targets), -1).T):
        goals.append(f"target {number} of fit")
        table = table.append_column(goals[-1], [goal])
    if weights is not None:
        table = table.append_column("weight of fit", [weights])
        options = {**options, "weight": "weight of fit"}
    return table, {**options, "target": goals}


def _plain(value: Any) -> Any:
    """Return NumPy values, as drawn by a search, as Python numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
