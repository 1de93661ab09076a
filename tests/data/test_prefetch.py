"""Prefetch thread: same batches, errors where they are used, bounded memory, and no thread left behind."""

import threading
import time

import jax
import numpy as np
import pytest

from jaxllm.data.dataset import TokenDataset
from jaxllm.data.prefetch import Prefetcher
from jaxllm.data.sequence_packing import pack_concat
from jaxllm.data.token_files import TokenDocuments


@pytest.fixture
def dataset():
    tokens = np.arange(200, dtype=np.uint16)
    starts, lengths = np.array([0, 90]), np.array([90, 110])
    return TokenDataset(
        TokenDocuments(tokens, starts, lengths, "test", "hash"), pack_concat(starts, lengths, 8), 4, 0, {}
    )


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [one for one in threading.enumerate() if one.name == "jaxllm-prefetch"]


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("did not happen within 5 s")


def test_the_batches_of_the_steps_on_the_device(dataset):
    with Prefetcher(dataset, 5, jax.device_put, shard=1, num_shards=2) as ahead:
        for expected in range(5, 25):
            step, batch = next(ahead)
            assert step == expected
            assert isinstance(batch.tokens, jax.Array)
            for one, other in zip(batch.arrays, dataset.batch_at(step, shard=1, num_shards=2).arrays, strict=True):
                np.testing.assert_array_equal(one, other)


def test_no_more_than_depth_are_made_ahead(dataset):
    made = []
    with Prefetcher(dataset, 0, lambda batch: made.append(1), depth=3) as ahead:
        wait_until(lambda: len(made) == 3)
        time.sleep(0.05)
        assert len(made) == 3
        next(ahead)
        wait_until(lambda: len(made) == 4)
        time.sleep(0.05)
        assert len(made) == 4


def test_an_error_comes_after_the_good_batches_and_stays(dataset):
    made = []

    def put(batch):
        if len(made) == 2:
            raise OSError("the disk is gone")
        made.append(batch)
        return batch

    with Prefetcher(dataset, 0, put) as ahead:
        assert [next(ahead)[0], next(ahead)[0]] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(ahead)


def test_closing_while_the_thread_waits_or_works(dataset):
    ahead = Prefetcher(dataset, 0, lambda batch: batch)
    ahead.close()
    ahead.close()
    assert list(ahead) == []
    begun = threading.Event()

    def slow(batch):
        begun.set()
        time.sleep(0.05)

    with Prefetcher(dataset, 0, slow):
        begun.wait()


def test_an_error_in_the_loop_closes_it(dataset):
    with pytest.raises(KeyError), Prefetcher(dataset, 0, lambda batch: batch):
        raise KeyError


def test_depth_is_checked(dataset):
    with pytest.raises(ValueError, match="prefetch depth is 0; it must be at least 1"):
        Prefetcher(dataset, 0, lambda batch: batch, depth=0)
