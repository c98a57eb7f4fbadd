"""A cross-validation with joblib's processes (loky): python folds_with_joblib.py QUESTION

One thread each; joblib maps the samples into all processes, which stay for all jobs.
"""

from __future__ import annotations

import sys

from folds import read_question, tell, train
from joblib import Parallel, delayed, parallel_config


def main() -> None:
    question = read_question(sys.argv[1])
    images, labels = question.samples()
    with parallel_config("loky", n_jobs=question.cores, inner_max_num_threads=1):
        jobs = (delayed(train)(question, job, images, labels, 1) for job in question.jobs())
        tell(Parallel()(jobs))


if __name__ == "__main__":
    main()
