"""Parts are found by their files: no list names them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytest
from torch import optim
from torch.optim import lr_scheduler

from tutti.data.builtin import BUILT_IN
from tutti.data.formats import FORMATS
from tutti.errors import UnknownName
from tutti.models import MODELS
from tutti.parts import OPTIMIZERS, SCHEDULES
from tutti.registry import Registry
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS

ROUND = '''"""Round things."""

from tutti.registry import part


@part("ball")
def make_ball():
    """Make a ball.

    It rolls.
    """
    return "ball"


@part("ring")
class Ring:
    pass


class Helper:
    """Not a part."""
'''


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """A package with a module of two parts, one of none, and one that cannot be imported."""
    folder = tmp_path / "things_zzz"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "round.py").write_text(ROUND)
    (folder / "support.py").write_text("LIMIT = 3\n")
    (folder / "broken.py").write_text(
        'raise RuntimeError("imported")\n\n@part("mine")\ndef mine():\n    """Explode."""\n'
    )
    sys.path.insert(0, str(tmp_path))
    yield folder
    sys.path.remove(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "things_zzz"]:
        del sys.modules[name]


def test_names_and_summaries_are_read_without_importing_a_part(package: Path) -> None:
    things: Registry[object] = Registry("things_zzz", "thing")
    assert list(things) == ["mine", "ball", "ring"]
    assert [things.summary(name) for name in things] == ["Explode.", "Make a ball.", "Round things."]
    assert "things_zzz.round" not in sys.modules


def test_a_registry_below_a_package_does_not_import_it(package: Path) -> None:
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "below").mkdir()
    (package / "below" / "flat.py").write_text(
        '@part("disc")\ndef disc(radius, width=1, *, depth=2, of): ...\n'
    )
    things: Registry[object] = Registry("things_zzz.below", "thing")
    assert list(things) == ["disc"]
    assert things.options("disc") == ("width", "depth")


def test_a_part_is_imported_when_it_is_asked_for(package: Path) -> None:
    things: Registry[type] = Registry("things_zzz", "thing")
    assert things["ring"].__name__ == "Ring"
    with pytest.raises(RuntimeError, match="imported"):
        things["mine"]


def test_an_unknown_name_is_refused_with_the_nearest(package: Path) -> None:
    things: Registry[object] = Registry("things_zzz", "thing", "Or give a file.")
    with pytest.raises(UnknownName, match=r"unknown thing 'bal'; did you mean 'ball'\?.*Or give a file\."):
        things.named("bal")


def test_two_parts_of_one_name_are_a_mistake(package: Path) -> None:
    (package / "second.py").write_text('@part("ball")\ndef another(): ...\n')
    things: Registry[object] = Registry("things_zzz", "thing")
    with pytest.raises(AssertionError, match="two parts are called ball"):
        list(things)


@pytest.mark.parametrize(
    "parts", [MODELS, BUILT_IN, FORMATS, LOSSES, METRICS], ids=["model", "data", "format", "loss", "metric"]
)
def test_every_part_has_a_summary_and_can_be_imported(parts: Registry[object]) -> None:
    assert all(parts.summary(name).endswith(".") for name in parts)
    assert len(list(parts.values())) == len(parts) > 1


@pytest.mark.parametrize(
    ("parts", "module", "base", "spelled"),
    [
        (OPTIMIZERS, optim, optim.Optimizer, str.lower),
        (SCHEDULES, lr_scheduler, lr_scheduler.LRScheduler, str),
    ],
)
def test_torchs_classes_and_their_options_are_found_in_its_files(
    parts: Registry[type], module: ModuleType, base: type, spelled: Callable[[str], str]
) -> None:
    kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and name[0] != "_"}
    left_out = (base, optim.Muon)  # ours has its name
    wanted = {
        spelled(name): kind for name, kind in kinds.items() if issubclass(kind, base) and kind not in left_out
    }
    assert {name: parts[name] for name in wanted} == wanted
    assert {name: parts.options(name) for name in wanted} == {
        name: tuple(signature(kind).parameters)[1:] for name, kind in wanted.items()
    }
