"""One job: its options, how its ranks are started, and what they do.

config.py         the options; `checks.py` refuses combinations
jobs.py           the options with the objects behind their names; `train_job.py`: the work of ranks
start.py          starts ranks, and others after a loss, as `recovery_policy.py` chooses them
train.py          on each rank: open data, build (`build.py`), restore (`restore.py`), fit
trained.py        a trained model in use; `evaluate.py` and `predict.py` use it on ranks
api.py            `tutti.train`
"""
