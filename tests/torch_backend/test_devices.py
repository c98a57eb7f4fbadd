"""Tensors that are not on the CPU: staged through host memory, or left to another backend."""

from contextlib import contextmanager

import pytest
import torch
from torch import distributed

from tests.torch_backend.process_groups import Ranks
from tutti.torch_backend import staging
from tutti.torch_backend.staging import Staging


class OnDevice:
    """A CUDA tensor as staging sees it; its memory is on the host here."""

    is_cpu, layout, device = False, torch.strided, torch.device("cuda", 0)

    def __init__(self, held):
        self.held, self.shape, self.dtype = held, held.shape, held.dtype

    data = property(lambda self: self)

    def is_complex(self):
        return self.held.is_complex()

    def numel(self):
        return self.held.numel()

    def copy_(self, vector):
        self.held.copy_(vector)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [one.held if isinstance(one, cls) else one for one in args]
        return function(*plain, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch):
    """The streams on which something was done; that of whoever asks is called after the device."""
    used = []

    @contextmanager
    def on(stream):
        used.append(stream)
        yield

    monkeypatch.setattr(staging.torch.cuda, "current_stream", lambda device: f"caller's on {device}")
    monkeypatch.setattr(staging.torch.cuda, "stream", on)
    return used


@pytest.fixture
def pinned(monkeypatch, streams):
    """Counts the tensors that would be pinned."""
    asked, empty = [], torch.empty

    def count(*shape, pin_memory=False, **options):
        asked.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(staging.torch, "empty", count)
    return asked


def test_a_cuda_tensor_passes_through_pinned_host_memory(pinned):
    tensor, staging = OnDevice(torch.arange(6.0).view(2, 3)), Staging()
    vector = staging.take(tensor)
    assert pinned == [True]
    assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    vector += 1
    assert tensor.held[0, 0] == 0.0
    staging.write_back()
    assert tensor.held.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_what_comes_back_is_copied_on_the_stream_of_the_caller(pinned, streams):
    staging = Staging()
    staging.take(OnDevice(torch.zeros(3)))
    staging.take(torch.zeros(3, 3).T)
    assert streams == []
    staging.write_back()
    assert streams == ["caller's on cuda:0"]


def test_what_is_only_read_is_not_written_back(pinned):
    tensor, staging = OnDevice(torch.zeros(3)), Staging()
    staging.take(tensor, write=False).fill_(7)
    staging.write_back()
    assert tensor.held.tolist() == [0.0] * 3


def test_a_default_device_of_the_program_does_not_reach_into_the_group():
    def work(rank):
        with torch.device("meta"):
            columns = torch.full((2, 3), 1.0 + rank, device="cpu").T
            distributed.all_reduce(columns)
            got = torch.zeros(3, 2, device="cpu").T
            if rank == 0:
                distributed.send(columns.T[:, ::2], 1)
            else:
                distributed.recv(got[:, ::2], 0)
            every = [torch.zeros(2, 2, device="cpu").T for _ in range(2)]
            distributed.all_gather(every, every[0] + rank)
        return columns.tolist(), [one.tolist() for one in every]

    with Ranks(2) as ranks:
        for columns, every in ranks.run(work):
            assert columns == [[3.0] * 2] * 3
            assert every == [[[0.0] * 2] * 2, [[1.0] * 2] * 2]
