"""Ranks find an address at which rank 0 answers."""

from __future__ import annotations

import dataclasses

import pytest

from tutti.errors import UserError
from tutti.launch import first_rank


def test_the_first_address_that_answers_is_taken() -> None:
    with first_rank.listening("127.0.0.1") as offer:
        several = dataclasses.replace(offer, addresses=("no such address", "127.0.0.1"))
        assert first_rank.reach(several) == "127.0.0.1"


def test_who_answers_with_another_token_is_not_rank_0() -> None:
    with first_rank.listening("127.0.0.1") as offer:
        other = dataclasses.replace(offer, token="x" * len(offer.token), addresses=("127.0.0.1",))
        with pytest.raises(UserError, match=r"cannot reach rank 0 .* \(127.0.0.1\).*mpirun -x MASTER_ADDR"):
            first_rank.reach(other)


def test_the_addresses_of_a_host_end_with_those_that_only_it_knows() -> None:
    found = first_rank.addresses_here()
    local = [one.startswith("127.") for one in found]
    assert local == sorted(local)
    assert any(local)
