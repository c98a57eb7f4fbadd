"""A cross-validation with Ray Tune: python folds_with_ray.py QUESTION

A grid over the jobs, one core and one thread each; actors are used again, the samples lie in Ray's object
store; no dashboard, no loggers, no checkpoints, no reports but the last one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "PYTHONWARNINGS": "ignore",
    # The workers need `folds`.
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}

import ray
from folds import Done, read_question, tell
from ray import tune


def trial(config, question, images, labels):
    from folds import train

    done = train(question, question.jobs()[config["job"]], images, labels, 1)
    tune.report(done._asdict())


def main() -> None:
    question = read_question(sys.argv[1])
    images, labels = question.samples()
    jobs = list(range(len(question.jobs())))
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=question.cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        trainable = tune.with_parameters(trial, question=question, images=images, labels=labels)
        found = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space={"job": tune.grid_search(jobs)},
            tune_config=tune.TuneConfig(reuse_actors=True),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        in_order = sorted(found, key=lambda result: result.config["job"])
        for result in in_order:
            if result.error is not None:
                raise result.error
        done = [Done(*(result.metrics[name] for name in Done._fields)) for result in in_order]
        ray.shutdown()
    tell(done)


if __name__ == "__main__":
    main()
