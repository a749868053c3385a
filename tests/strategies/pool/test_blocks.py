"""How a pool is cut into blocks, and what runs them; tests/strategies/pool/test_pool.py tests what they compute."""

import threading

import numpy as np
import pytest
import torch

from fedcross.strategies.pool import blocks, kernels


def test_a_small_pool_is_one_block():
    assert blocks.column_groups(10, 4, 3, 700) == [[slice(3, 700)]]
    assert blocks.column_groups(10, 4, 5, 5) == []


def test_blocks_are_whole_multiples_of_256_columns_and_four_make_a_group():
    """4 MiB of 10 float32 rows are 104,857.6 columns, 409.6 times 256: blocks of 409 * 256 = 104,704."""
    width = 104_704
    edges = [7 + i * width for i in range(6)]
    found = blocks.column_groups(10, 4, 7, 7 + 5 * width + 1)
    assert found == [
        [slice(a, a + width) for a in edges[:4]],
        [slice(edges[4], edges[5]), slice(edges[5], edges[5] + 1)],
    ]


def test_blocks_have_256_columns_at_least():
    assert blocks.column_groups(2**20, 4, 0, 600) == [[slice(0, 256), slice(256, 512), slice(512, 600)]]


@pytest.mark.parametrize("count", [1, 2])
def test_each_thread_computes_with_one_thread_of_torch(count):
    groups = blocks.column_groups(2**20, 4, 0, 256 * 4 * 3)
    seen: dict[int, int] = {}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        blocks.over_groups(lambda number, _: seen.update({number: torch.get_num_threads()}), groups)
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert seen == {0: 1, 1: 1, 2: 1}


def test_one_thread_is_the_callers_own():
    threads = torch.get_num_threads()
    seen = set()
    try:
        torch.set_num_threads(1)
        blocks.over_groups(lambda *_: seen.add(threading.get_ident()), blocks.column_groups(2**20, 4, 0, 256 * 4 * 3))
    finally:
        torch.set_num_threads(threads)
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize(("limit", "compiled"), [(0, True), (1, False)])
def test_pools_of_just_that_many_bytes_use_the_compiled_loops(limit, compiled, monkeypatch):
    rows = np.ones((2, 3), np.float32)
    used = []
    monkeypatch.setattr(blocks, "KERNEL_BYTES", rows.nbytes + limit)
    monkeypatch.setattr(blocks, "_compiled_gram", lambda *given: used.append("gram"))
    monkeypatch.setattr(blocks, "_compiled_mix", lambda *given: used.append("mix"))
    blocks.gram(rows, np.arange(2), slice(None))
    blocks.mix(rows, np.arange(2), np.array([[0, 1], [1, 0]]), np.array([[0.5, 0.5]] * 2))
    monkeypatch.setattr(kernels, "mean", lambda *given: used.append("mean"))
    blocks.mean(rows, np.arange(2), rows[0].copy())
    assert used == (["gram", "mix", "mean"] if compiled else [])


@pytest.mark.parametrize("members", [range(5), [3, 0, 4]])
@pytest.mark.parametrize("block_bytes", [1, blocks.BLOCK_BYTES])
def test_both_ways_to_a_mean_are_one_to_the_bit(members, block_bytes, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    rows, chosen = np.random.default_rng(3).normal(size=(5, 3000)).astype(np.float32), np.array(members)
    plain, compiled = np.empty((2, 3000), np.float32)
    blocks.mean(rows, chosen, plain)
    monkeypatch.setattr(blocks, "KERNEL_BYTES", 0)
    blocks.mean(rows, chosen, compiled)
    assert (plain == compiled).all()
    np.testing.assert_allclose(plain, rows[chosen].mean(axis=0, dtype=np.float64), rtol=1e-7)
