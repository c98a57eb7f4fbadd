"""Messages spell options in the way in which their reader gave them."""

from __future__ import annotations

import pytest

from tutti.errors import BadOption, UnknownName
from tutti.run.arguments import as_arguments, in_own_loop, in_python
from tutti.strategies import Local


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Lower the rate (--lr), or --clip-norm 1, or look", "Lower the rate (lr), or clip_norm=1, or look"),
        ("--batch-size is 3; use '--batch-size 24' or more", "batch_size is 3; use batch_size=24 or more"),
        ("use '-n 2' or '--strategy sync'", "use workers=2 or strategy='sync'"),
        ("--servers keep the centre; leave them out", "servers keep the centre; leave them out"),
        ("use --device cpu.", "use device='cpu'."),
        ("--device is 'cuda', or use --device cpu", "device is 'cuda', or use device='cpu'"),
        ("give --data.classes 4, or --loss mse", "give data_options={'classes': 4}, or loss='mse'"),
        ("give --data.classes N if they are", "give data_options={'classes': N} if they are"),
        ("--parallel.microbatches is 4", "parallel_options['microbatches'] is 4"),
        ("by --data.target NAME; its", "by data_options={'target': 'NAME'}; its"),
        ("by --data.missing drop, or", "by data_options={'missing': 'drop'}, or"),
        ("by --data.columns A,B,...", "by data_options={'columns': 'A,B,...'}"),
        ("no numbers: --data.columns age,income", "no numbers: data_options={'columns': 'age,income'}"),
        ("--resume auto goes on with it", "resume='auto' goes on with it"),
        ("use --parallel.schedule gpipe", "use parallel_options={'schedule': 'gpipe'}"),
        ("'--strategy.momentum 0'", "strategy_options={'momentum': 0}"),
        (
            "'--strategy downpour --strategy.side worker'",
            "strategy='downpour' strategy_options={'side': 'worker'}",
        ),
        ("--parallel tensor=3 on 2 ranks; use -n 3", "parallel='tensor=3' on 2 ranks; use workers=3"),
        (
            "--validate background evaluates; use --validate pause",
            "validate='background' evaluates; use validate='pause'",
        ),
        ("use --cuda-graph off", "use cuda_graph='off'"),
        ("give --validation 0.1.", "give validation=0.1."),
        ("leave --strategy out, or use sync", "leave strategy out, or use sync"),
        (
            "try 'srun --mpi=pmix' or mpirun --host HOST:1 -n many",
            "try 'srun --mpi=pmix' or mpirun --host HOST:1 -n many",
        ),
        (
            "--force is an option of other commands; a -- dash",
            "--force is an option of other commands; a -- dash",
        ),
    ],
)
def test_an_option_of_the_command_line_becomes_an_argument(message: str, expected: str) -> None:
    assert in_python(message) == expected


def test_errors_keep_their_class_and_what_they_carry() -> None:
    with pytest.raises(BadOption, match=r"^lr is 0$"), as_arguments():
        raise BadOption("--lr is 0")
    with pytest.raises(UnknownName, match="unknown value 'of' of cuda_graph") as caught, as_arguments():
        raise UnknownName("value", "of", ("auto", "on", "off"), of="--cuda-graph")
    assert caught.value.name == "of"


class Mine(Local):
    """A strategy of a user's."""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "use '--optimizer sgd', or '--strategy.momentum 0'",
            "use torch.optim.SGD, or strategy=tutti.Local(momentum=0)",
        ),
        ("use --optimizer lamb", "use tutti.optim.optimizers.lamb.LAMB"),
        ("'--strategy downpour --strategy.side worker'", "strategy=tutti.Downpour(side='worker')"),
        ("--strategy.push-every 4", "strategy=tutti.Local(push_every=4)"),
        ("use '-n 1' or '--strategy sync'", "use '-n 1' or strategy='sync'"),
        ("leave --hosts out, or --strategy out", "leave --hosts out, or --strategy out"),
    ],
)
def test_a_loop_of_one_s_own_is_told_of_objects_and_of_options_of_its_launcher(
    message: str, expected: str
) -> None:
    assert in_own_loop(message, Local) == expected


def test_a_loop_with_a_strategy_of_the_user_s_is_told_of_that() -> None:
    assert in_own_loop("'--strategy.every 4'", Mine) == "strategy=Mine(every=4)"
