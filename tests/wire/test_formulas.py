"""The closed forms, against counting by hand; that they equal what is metered is test_bytes.py's."""

import pytest

from fourfold.wire import formulas


@pytest.mark.parametrize("count", [0, 1, 5, 12, 101])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_shares_are_contiguous_even_and_complete(count: int, size: int) -> None:
    shares = formulas.shares(count, size)
    assert sum(shares) == count
    assert len(shares) == size
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_even_forms_are_those_of_the_ring() -> None:
    # (n − 1)/n · S for gather and scatter, twice that for the sum: facts, prototypes.md A1.
    assert formulas.all_gather(4, 4000) == 3000
    assert formulas.reduce_scatter(4, 4000) == 3000
    assert [formulas.all_reduce(4, 4000, 4, index) for index in range(4)] == [6000] * 4
    assert formulas.all_to_all([1000] * 4, 2) == 3000
    assert formulas.barrier(4) == 3


def test_uneven_all_reduce_by_hand() -> None:
    # 5 floats on 3 ranks: parts of 2, 2, 1. Rank 0 sends 3 in the exchange and its 2 twice; rank 2 sends 4 and 1 twice.
    assert [formulas.all_reduce(3, 20, 4, index) for index in range(3)] == [28, 28, 24]


def test_all_reduce_of_parts_that_a_codec_made() -> None:
    # A header of 8 bytes a part: what goes out is every other part once, and the own one to every other rank.
    assert formulas.all_reduce_of_parts([8 + 4, 8 + 4, 8 + 2], 2) == 24 + 2 * 10
    assert formulas.all_reduce_of_parts([8, 8, 4], 0) == formulas.all_reduce(3, 20, 4, 0)


def test_uneven_gathers_and_scatters_by_hand() -> None:
    # Shards of 8, 0 and 4 bytes: each goes to two others; of a whole of 12 bytes each rank keeps its own part back.
    assert [formulas.all_gather_of_parts([8, 0, 4], index) for index in range(3)] == [16, 0, 8]
    assert [formulas.reduce_scatter_of_parts([8, 0, 4], index) for index in range(3)] == [4, 12, 8]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_equal_parts_give_the_even_forms(size: int) -> None:
    parts = [24] * size
    for index in range(size):
        assert formulas.all_gather_of_parts(parts, index) == formulas.all_gather(size, 24 * size)
        assert formulas.reduce_scatter_of_parts(parts, index) == formulas.reduce_scatter(size, 24 * size)


@pytest.mark.parametrize("count", [0, 3, 29])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_sum_without_a_list_of_parts_is_the_sum_of_its_parts(count: int, size: int) -> None:
    parts = [2 * share for share in formulas.shares(count, size)]
    for index in range(size):
        assert formulas.all_reduce(size, 2 * count, 2, index) == formulas.all_reduce_of_parts(parts, index)


def test_uneven_all_to_all_keeps_its_own_part() -> None:
    assert formulas.all_to_all([3, 5, 7], 1) == 10


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_broadcasts_add_up_to_one_copy_for_every_other_rank(size: int) -> None:
    assert sum(formulas.broadcast(size, 101, index) for index in range(size)) == 101 * (size - 1)


def test_one_rank_sends_nothing() -> None:
    assert formulas.all_gather(1, 40) == formulas.reduce_scatter(1, 40) == formulas.all_reduce(1, 40, 4) == 0
    assert formulas.broadcast(1, 40) == formulas.barrier(1) == formulas.all_to_all([40], 0) == 0
