"""When a rank of a DDP program leaves, the other says at once who it was, and ends."""

from __future__ import annotations

import json

import pytest

from tests.ecosystem.jobs import python
from tests.ecosystem.leaving import WAYS

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What became of the ranks, by way of leaving."""
    path = tmp_path_factory.mktemp("leaving") / "found.json"
    done = python("leaving.py", str(path), "tutti")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("way", WAYS)
def test_the_other_rank_names_the_one_that_is_gone(found, way):
    assert found[way]["caught"] is not None, found[way]
    assert f"rank {WAYS[way].leaver}" in found[way]["caught"]


@pytest.mark.parametrize("way", WAYS)
def test_the_other_rank_does_not_wait_for_its_time_out(found, way):
    assert found[way]["seconds"] < 20


@pytest.mark.parametrize("way", WAYS)
def test_both_ranks_end(found, way):
    assert found[way]["hang"] == []
