"""Messages spell options in the way in which their reader gave them."""

from __future__ import annotations

import pytest

from tutti.errors import UnknownName
from tutti.run.arguments import as_arguments, in_python


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Lower the rate (--lr), or --clip-norm 1, or look", "Lower the rate (lr), or clip_norm=1, or look"),
        ("--batch-size is 3; use '--batch-size 24' or more", "batch_size is 3; use batch_size=24 or more"),
        ("use '-n 2' or '--strategy sync'", "use workers=2 or strategy sync"),
        ("give --data.classes 4, or --loss mse", "give data_options={'classes': 4}, or loss mse"),
        ("give --data.classes none", "give data_options={'classes': 'none'}"),
        ("give '--data.size HEIGHT,WIDTH'", "give data_options={'size': [HEIGHT,WIDTH]}"),
        (
            "--data.missing drop, or --data.stream true",
            "data_options={'missing': 'drop'}, or data_options={'stream': True}",
        ),
        ("by --data.target NAME or '--optimizer.lr'", "by target=NAME or optimizer_options={'lr': ...}"),
        (
            "mpirun --host HOST:1 -n many, --force; a -- dash",
            "mpirun --host HOST:1 -n many, --force; a -- dash",
        ),
    ],
)
def test_an_option_of_the_command_line_becomes_an_argument(message: str, expected: str) -> None:
    assert in_python(message) == expected


def test_errors_keep_their_class_and_what_they_carry() -> None:
    with pytest.raises(UnknownName, match="unknown value 'of' of cuda_graph") as caught, as_arguments():
        raise UnknownName("value", "of", ("auto", "on", "off"), of="--cuda-graph")
    assert caught.value.name == "of"
