"""Objects named as `package.module:object` or `file.py:object` are found, and failures say what to do."""

from __future__ import annotations

import pickle
import sys

import pytest

from tutti.errors import BadOption, UnknownName
from tutti.load_object import call_with_options, load_object, names_object, takes_option


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Leaves the search path and the imported modules as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_object_of_an_installed_module_is_found():
    assert load_object("pathlib:Path.cwd", "model") == __import__("pathlib").Path.cwd


def test_an_object_of_a_file_is_found_and_its_module_is_imported_once(tmp_path):
    (tmp_path / "beside.py").write_text("size = 7\n")
    (tmp_path / "mine.py").write_text("import beside\nclass Net:\n    size = beside.size\n")
    found = load_object(f"{tmp_path}/mine.py:Net", "model")
    assert found.size == 7
    assert load_object(f"{tmp_path}/../{tmp_path.name}/mine.py:Net", "model") is found
    assert type(pickle.loads(pickle.dumps(found()))) is found


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "only_here_zzz.py").write_text("def make(): return 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("only_here_zzz:make", "model")() == 3


def test_a_user_file_does_not_replace_the_standard_library(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert callable(load_object("colorsys:rgb_to_hsv", "model"))


def test_a_missing_object_names_the_nearest(tmp_path):
    (tmp_path / "nets.py").write_text("import os\ndef build_net(): pass\n")
    with pytest.raises(
        UnknownName, match=r"'build_ne' of .*nets\.py; did you mean 'build_net'\? Known: build_net\."
    ):
        load_object(f"{tmp_path}/nets.py:build_ne", "model")


def test_objects_and_other_names_of_imported_ones_are_known(tmp_path):
    (tmp_path / "bound.py").write_text(
        "import os\nfrom pathlib import Path, PurePath as Pure\nClass = Path\nhere = Path('.')\n_own = 1\n"
        "WIDTH = 3\ndef make(): pass\n"
    )
    with pytest.raises(UnknownName) as refused:
        load_object(f"{tmp_path}/bound.py:mak", "model")
    assert refused.value.known == ["Class", "Pure", "WIDTH", "here", "make"]


@pytest.mark.parametrize("spec", ["nets.py", "nets.py:", ":make", "nets"])
def test_a_spec_without_object_is_refused(spec):
    with pytest.raises(BadOption, match=r"names no object; write it as '(nets.py|package.module):NAME'"):
        load_object(spec, "model")


def test_missing_files_and_modules_are_refused(tmp_path):
    with pytest.raises(BadOption, match=r"the model '.*no\.py:make' is in no file: there is no /"):
        load_object(f"{tmp_path}/no.py:make", "model")
    with pytest.raises(BadOption, match="no module 'no_such_zzz'; install its package"):
        load_object("no_such_zzz.nets:make", "model")


def test_a_file_that_fails_says_where_and_can_be_mended(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nimport no_such_module_zzz\n")
    with pytest.raises(
        BadOption, match=r"failed: ModuleNotFoundError: .*zzz.*broken\.py, line 2\); mend that module"
    ):
        load_object(f"{path}:make", "model")
    path.write_text("def make(:\n")
    with pytest.raises(BadOption, match=r"failed: SyntaxError: .*broken\.py, line 1"):
        load_object(f"{path}:make", "model")
    path.write_text("def make(): return 'mended'\n")
    assert load_object(f"{path}:make", "model")() == "mended"


def test_a_module_that_fails_is_told_from_one_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "failing_zzz.py").write_text("import no_such_module_zzz\n")
    (tmp_path / "raising_zzz.py").write_text("raise ValueError('seven')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOption, match=r"importing the model .* failed: ModuleNotFoundError"):
        load_object("failing_zzz:make", "model")
    with pytest.raises(BadOption, match=r"failed: ValueError: seven \(at .*raising_zzz\.py, line 1\)"):
        load_object("raising_zzz:make", "model")


def test_words_that_name_objects_are_told_apart():
    assert names_object("a.b:c")
    assert names_object("file.py")
    assert not names_object("lenet")


def make(width: int, depth: int = 2) -> tuple[int, int]:
    return width, depth


def test_options_are_checked_before_the_call():
    assert call_with_options(make, {"width": 3}, "model", "m:make") == (3, 2)
    with pytest.raises(
        UnknownName, match="unknown option 'widht' of the model 'm:make'; did you mean 'width'"
    ):
        call_with_options(make, {"widht": 3}, "model", "m:make")
    with pytest.raises(BadOption, match="needs the option 'width', which is not given"):
        call_with_options(make, {"depth": 3}, "model", "m:make")
    with pytest.raises(BadOption, match="is no function or class but int"):
        call_with_options(5, {}, "model", "m:make")


def test_all_options_are_listed_but_those_that_no_user_can_give():
    with pytest.raises(UnknownName) as refused:
        call_with_options(make, {"depth": 3, "deph": 1}, "model", "m:make", {"width": 3})
    assert refused.value.known == ["depth"]


def test_open_ended_and_silent_callables_take_everything():
    assert call_with_options(lambda **options: options, {"a": 1}, "model", "m:f") == {"a": 1}
    assert call_with_options(dict, {"a": 1}, "model", "m:f") == {"a": 1}


def test_parameters_are_found_by_name():
    assert takes_option(make, "depth")
    assert not takes_option(make, "height")
    assert not takes_option(None, "depth")
