"""The order of the data is a pure function of (seed, step)."""

import numpy as np
import pytest
import torch

from fourfold.training.data import CorpusError, Source, synthetic


def source(count: int = 101, **more) -> Source:
    settings = {"sequence": 10, "rows": 3, "seed": 7} | more
    return Source(np.arange(count, dtype=np.uint16), np.arange(1000, 1041, dtype=np.uint16), **settings)


def starts(batch) -> list[int]:
    return batch(range(batch.rows))["tokens"][:, 0].tolist()


def test_a_row_is_a_window_and_its_last_target():
    data = source()
    tokens = data.batch(0)(range(3))["tokens"]
    assert tokens.dtype == torch.int64
    assert tokens.shape == (3, 11)
    for row in tokens:
        assert row.tolist() == list(range(int(row[0]), int(row[0]) + 11))
        assert int(row[0]) % 10 == 0


def test_every_epoch_sees_every_window_once_in_another_order():
    data = source()
    assert data.train_windows == 10
    seen = [start for step in range(10) for start in starts(data.batch(step))]
    epochs = [seen[:10], seen[10:20], seen[20:]]
    assert all(sorted(epoch) == list(range(0, 100, 10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_cut_of_the_rows_gives_the_same_rows():
    batch = source().batch(3)
    whole = batch(range(3))["tokens"]
    parts = torch.cat([batch(range(1))["tokens"], batch(range(1, 3))["tokens"]])
    assert torch.equal(whole, parts)
    assert batch(range(0))["tokens"].shape == (0, 11)


def test_the_position_is_one_integer_and_the_order_hangs_on_the_seed():
    assert starts(source().batch(41)) == starts(source().batch(41))
    assert [starts(source(seed=8).batch(step)) for step in range(4)] != [
        starts(source().batch(step)) for step in range(4)
    ]


def test_evaluation_is_always_the_same_and_never_trains():
    data = source()
    batches = data.evaluation(5)
    assert data.held_windows == 4
    assert [batch.rows for batch in batches] == [3, 1]
    assert [start for batch in batches for start in starts(batch)] == [1000, 1010, 1020, 1030]
    assert [start for batch in source(seed=9).evaluation(5) for start in starts(batch)] == [1000, 1010, 1020, 1030]
    assert [starts(batch) for batch in source(rows=2).evaluation(1)] == [[1000, 1020]]


def test_no_held_out_text_means_no_evaluation():
    assert Source(np.arange(50), np.arange(0), sequence=10, rows=1, seed=0).evaluation(3) == []


def test_what_no_window_holds_is_said():
    assert source(101).notes == []
    assert "the last 6 tokens" in source(107).notes[0]


def test_fewer_tokens_than_a_window_are_refused():
    with pytest.raises(CorpusError, match="the training part has 10 tokens, fewer than the 11"):
        source(10)
    with pytest.raises(CorpusError, match="the held-out part has 3 tokens"):
        Source(np.arange(50), np.arange(3), sequence=10, rows=1, seed=0)


def test_synthetic_tokens_are_the_same_everywhere():
    tokens = synthetic(1000, 50, seed=3)
    assert np.array_equal(tokens, synthetic(1000, 50, seed=3))
    assert not np.array_equal(tokens, synthetic(1000, 50, seed=4))
    assert np.array_equal(tokens[:100], synthetic(100, 50, seed=3))
    assert int(tokens.max()) < 50
    assert set(((tokens[1:].astype(int) - tokens[:-1]) % 50).tolist()) == {0, 1, 2, 3}
