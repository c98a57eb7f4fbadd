"""Objects named as `package.module:object` or `file.py:object` are found, and failures say what to do."""

from __future__ import annotations

import pickle
import sys

import pytest

from tutti.errors import BadOption, UnknownName
from tutti.load_object import call_with_options, load_object, names_object, takes_option


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The working directory; the search path and the imported modules are left as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_object_of_a_module_is_found_here_or_where_it_is_installed(folder):
    assert load_object("pathlib:Path.cwd", "model") == __import__("pathlib").Path.cwd
    (folder / "only_here_zzz.py").write_text("def make(): return 3\n")
    assert load_object("only_here_zzz:make", "model")() == 3
    # A file of the user's does not replace the standard library.
    (folder / "colorsys.py").write_text("")
    assert callable(load_object("colorsys:rgb_to_hsv", "model"))


def test_an_object_of_a_file_is_found_and_its_module_is_imported_once(folder):
    (folder / "beside.py").write_text("size = 7\n")
    (folder / "mine.py").write_text("import beside\nclass Net:\n    size = beside.size\n")
    found = load_object(f"{folder}/mine.py:Net", "model")
    assert found.size == 7
    assert load_object(f"{folder}/../{folder.name}/mine.py:Net", "model") is found
    assert type(pickle.loads(pickle.dumps(found()))) is found


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nets.py:build_ne", UnknownName, r"nets\.py; did you mean 'build_net'"),
        ("nets.py", BadOption, "file.py:NAME"),
        (":make", BadOption, "package.module:NAME"),
        ("no.py:make", BadOption, r"there is no /"),
        ("no_such_zzz.nets:make", BadOption, "No module named 'no_such_zzz'"),
        ("broken.py:make", BadOption, r"ModuleNotFoundError: .*broken\.py, line 2"),
        ("broken:make", BadOption, "ModuleNotFoundError"),
        ("wrong.py:make", BadOption, r"SyntaxError: .*wrong\.py, line 1"),
    ],
)
def test_what_cannot_be_loaded_is_refused(folder, spec, error, message):
    (folder / "nets.py").write_text("import os\ndef build_net(): pass\n")
    (folder / "broken.py").write_text("x = 1\nimport no_such_module_zzz\n")
    (folder / "wrong.py").write_text("def make(:\n")
    with pytest.raises(error, match=message):
        load_object(spec, "model")


def test_a_file_that_has_failed_can_be_mended(folder):
    (folder / "nets.py").write_text("raise ValueError\n")
    with pytest.raises(BadOption):
        load_object("nets.py:make", "model")
    (folder / "nets.py").write_text("def make(): return 'mended'\n")
    assert load_object("nets.py:make", "model")() == "mended"


def test_words_that_name_objects_are_told_apart():
    assert [names_object(word) for word in ("a.b:c", "file.py", "lenet", "s3://a/b")] == [
        True,
        True,
        False,
        False,
    ]


def make(width: int, depth: int = 2) -> tuple[int, int]:
    return width, depth


def test_options_are_checked_before_the_call():
    assert call_with_options(make, {"width": 3}, "model", "m:make") == (3, 2)
    assert call_with_options(dict, {"a": 1}, "model", "m:f") == {"a": 1}
    with pytest.raises(UnknownName) as refused:
        call_with_options(make, {"depth": 3, "deph": 1}, "model", "m:make", {"width": 3})
    assert refused.value.known == ["depth"]
    with pytest.raises(BadOption, match="'width'"):
        call_with_options(make, {"depth": 3}, "model", "m:make")
    with pytest.raises(BadOption, match="int"):
        call_with_options(5, {}, "model", "m:make")
    assert [takes_option(make, "depth"), takes_option(make, "height"), takes_option(None, "depth")] == [
        True,
        False,
        False,
    ]
