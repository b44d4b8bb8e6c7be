"""Batches are a pure function of (seed, step), and their hashes prove which tokens a run saw."""

from __future__ import annotations

import numpy as np
import pytest

from nexus_ablate.data import Batches, chain, eval_places, eval_windows, hash_tokens

TOKENS = np.arange(1000, dtype=np.uint16)


def test_a_batch_depends_on_seed_and_step_alone_whatever_was_drawn_before():
    fresh = Batches(TOKENS, seed=3, batch_size=4, context=8).batch(7)
    used = Batches(TOKENS, seed=3, batch_size=4, context=8)
    for step in (9, 0, 7, 8):
        used.batch(step)
    np.random.seed(0)
    np.testing.assert_array_equal(used.batch(7), fresh)
    assert not np.array_equal(used.batch(8), fresh)
    assert not np.array_equal(Batches(TOKENS, seed=4, batch_size=4, context=8).batch(7), fresh)


def test_a_batch_leaves_the_global_generator_alone():
    np.random.seed(1)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    Batches(TOKENS, seed=0, batch_size=4, context=8).batch(0)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # type: ignore[index]


def test_the_draw_is_pinned_for_good():
    assert Batches(TOKENS, 3, 4, 8).batch(7)[:, 0].tolist() == [547, 676, 217, 468]


def test_windows_are_contiguous_int64_and_every_start_is_reached():
    batch = Batches(TOKENS[:20], seed=0, batch_size=2000, context=8).batch(0)
    assert batch.shape == (2000, 9) and batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()
    assert set(batch[:, 0]) == set(range(12))  # 12 windows of 9 in 20 tokens: the last one ends with the last token
    counts = np.bincount(batch[:, 0], minlength=12)
    assert counts.min() > 100 and counts.max() < 250


def test_tokens_that_hold_no_window_are_refused():
    assert Batches(TOKENS[:9], 0, 2, context=8).batch(0).shape == (2, 9)
    for make in (
        lambda: Batches(TOKENS[:8], 0, 2, context=8),
        lambda: eval_windows(TOKENS[:8], 8, 8),
        lambda: eval_windows(TOKENS[:16], 8, 8, factor=2),
    ):
        with pytest.raises(ValueError, match="shorter than one window"):
            make()


def assert_spread(starts, block, length, context, period=1):
    """Blocks of neighbouring windows, alike in size, at even distances from the first token to the last."""
    stride = context if period == 1 else period
    assert starts[0] == 0 and not (starts % stride).any()
    assert block[0] == 0 and set(np.diff(block)) <= {0, 1}
    within = np.diff(block) == 0
    assert (np.diff(starts)[within] == stride).all()
    gaps, sizes = np.diff(starts)[~within] - stride, np.bincount(block)
    assert sizes.max() - sizes.min() <= 1
    assert not len(gaps) or 0 <= gaps.max() - gaps.min() <= stride
    assert length - starts[-1] - (context + 1) in range(stride)  # no further window fits behind the last one


@pytest.mark.parametrize("period", [1, 12])
@pytest.mark.parametrize("context", [1, 7, 11])
def test_evaluation_windows_are_blocks_spread_from_the_first_token_to_the_last(context: int, period: int):
    stride = context if period == 1 else period
    for length in (97, 1000, 12_345, 40_000):
        available = (length - context - 1) // stride + 1
        for wanted in (2, 5, 8, 9, 63, 64, 255, 256, 300, 1000, 2999, 10**9):
            starts, block = eval_places(length, context, wanted * context, period)
            assert len(starts) == len(block) == min(wanted, available)
            assert_spread(starts, block, length, context, period)
            assert block[-1] + 1 == max(len(starts) // 32, min(len(starts), 8))


def test_control_windows_of_the_head_are_not_spread():
    starts, block = eval_places(4000, 10, 500)
    assert_spread(starts, block, 4000, 10)
    with pytest.raises(AssertionError):
        assert_spread(np.arange(50) * 10, block, 4000, 10)


def test_one_window_is_the_first():
    assert [places.tolist() for places in eval_places(1000, 10, 10)] == [[0], [0]]


def test_evaluation_windows_are_the_tokens_at_their_places_and_no_token_is_a_target_twice():
    windows = eval_windows(TOKENS, context=10, n_tokens=95)
    assert windows.shape == (10, 11) and windows.dtype == np.int64  # rounded up to whole windows
    np.testing.assert_array_equal(windows, eval_places(1000, 10, 95)[0][:, None] + np.arange(11))
    assert len(np.unique(windows[:, 1:])) == 100
    everything = eval_windows(TOKENS, context=10, n_tokens=10**9)
    np.testing.assert_array_equal(everything[:, 1:].ravel(), np.arange(1, 991))


@pytest.mark.parametrize(("windows", "longer"), [(512, 64), (10**6, 1249), (8, 7), (20, 7)])
def test_longer_windows_are_of_the_same_text(windows: int, longer: int):
    """Eight contexts at a time: the same targets where blocks hold whole ones, else more text behind each block."""
    tokens = np.arange(100_000)
    short, long = (eval_windows(tokens, 10, windows * 10, factor=factor) for factor in (1, 8))
    assert long.shape == (longer, 81)
    assert len(np.unique(long[:, 1:])) == long[:, 1:].size
    assert set(long[:, 0]) <= set(short[:, 0])
    assert len(np.setdiff1d(short[:, 1:], long[:, 1:])) < 80  # at the very end, where no whole one fits
    if windows == 512:
        np.testing.assert_array_equal(np.unique(long[:, 1:]), np.unique(short[:, 1:]))


def test_hashes_know_values_and_shape_but_not_the_integer_type():
    assert hash_tokens(TOKENS) == hash_tokens(TOKENS.astype(np.int64)) and len(hash_tokens(TOKENS)) == 32
    assert hash_tokens(TOKENS) != hash_tokens(TOKENS.reshape(10, 100))
    assert hash_tokens(TOKENS) != hash_tokens(TOKENS[::-1])


def test_the_chain_names_the_order_of_the_batches_and_continues_from_where_it_was():
    first, second = TOKENS[:8].reshape(2, 4), TOKENS[8:16].reshape(2, 4)
    whole = chain(chain("", first), second)
    assert whole != chain(chain("", second), first)
    assert whole == chain(str(chain("", first)), second.copy())
    assert whole != chain("", second)
