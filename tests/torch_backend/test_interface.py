"""The interface that the installed torch expects of a process group, for any version."""

import ast
import inspect
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d

from tests.torch_backend.process_groups import Ranks
from tutti.torch_backend.cpp_stub import register_stub
from tutti.torch_backend.group import TuttiGroup

GROUPS = {"group", "pg", "process_group", "default_pg", "parent_pg", "split_pg", "group_to_use"}
"""What torch's own code calls its variables that hold a group."""

TORCHS_OWN = {"_register_backend", "_set_default_backend", "_get_backend", "get_backend"}
FOR_BACKENDS_THAT_COALESCE = {"_start_coalescing", "_end_coalescing"}
FOR_GROUPS_MADE_IN_CPP = {"_has_hooks", "_wait_for_pending_works"}
WITHOUT_EFFECT = {"_add_ephemeral_timeout"}
REFUSED = {"split_group", "monitored_barrier", "new_window", "reconfigure", "get_reconfigure_handle"}


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as started:
        yield started


def test_every_operation_that_torch_calls_on_a_group_is_there():
    names = {name for name in dir(ProcessGroup) if inspect.isroutine(getattr(ProcessGroup, name))}
    called = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(distributed_c10d)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in GROUPS
    }
    assert called >= {"allreduce", "allgather", "barrier", "send", "shutdown"}
    written = TuttiGroup.__mro__[: TuttiGroup.__mro__.index(ProcessGroup)]
    ours = {name for kind in written for name in vars(kind)}
    left = TORCHS_OWN | FOR_BACKENDS_THAT_COALESCE | FOR_GROUPS_MADE_IN_CPP | WITHOUT_EFFECT | REFUSED
    assert called & names <= ours | left


def test_torch_may_ask_a_group_for_its_backend(three):
    def ask(rank):
        return distributed.group.WORLD._get_backend(torch.device("cpu")).supports_coalescing

    assert three.run(ask) == [False] * 3


needs_backend_stub = pytest.mark.skipif(
    register_stub(ProcessGroup(0, 1), timedelta(seconds=1)) is None,
    reason="this torch has a monitored barrier for its own backends alone",
)


@needs_backend_stub
def test_a_device_given_at_the_beginning_changes_nothing():
    def work(rank, port):
        store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        device = torch.device("cpu", 0)
        distributed.init_process_group("tutti", store=store, rank=rank, world_size=3, device_id=device)
        found = []
        for group in (None, distributed.new_group([0, 2])):
            if group is not distributed.GroupMember.NON_GROUP_MEMBER:
                vector = torch.tensor([float(rank)])
                distributed.all_reduce(vector, group=group)
                found += vector.tolist()
        return found

    with Ranks(3, backend=None) as ranks:
        assert ranks.run(work, ranks.store.port) == [[3.0, 2.0], [3.0], [3.0, 2.0]]
