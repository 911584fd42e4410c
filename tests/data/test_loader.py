"""The order of samples: epochs, resuming, hosts, mixtures; and what must not be left behind."""

import collections
import itertools
import threading
import time

import numpy as np
import pytest
from synthetic import into_shards, numbered_documents

from orthros_jax.config import DataConfig
from orthros_jax.data.loader import check_vocabulary, evaluation_batches, open_datasets, training_batches
from orthros_jax.errors import UserError

LENGTH = 4


@pytest.fixture
def folder(write_dataset):
    """23 training windows and 7 held-out ones, each known by its first token."""
    train = numbered_documents([3, 1, 12, 7, 30, 2, 38], first=1)
    heldout = numbered_documents([9, 17], first=1001)
    return write_dataset("set", into_shards(train, 3), into_shards(heldout, 2))


def settings(*paths, **changes):
    return DataConfig(paths=[str(path) for path in paths], sequence_length=LENGTH, **changes)


def firsts(batch):
    return batch["tokens"][:, 0].tolist()


def take(iterator, batches):
    rows = [first for batch in itertools.islice(iterator, batches) for first in firsts(batch)]
    iterator.close()
    return rows


def sequence(data, samples, seed=0):
    return take(training_batches(data, batch_size=1, seed=seed), samples)


def test_each_epoch_visits_every_window_once_in_another_order(folder):
    rows = sequence(settings(folder), 3 * 23)
    epochs = [rows[i : i + 23] for i in range(0, len(rows), 23)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, 93, LENGTH))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != sorted(epochs[0])


def test_order_depends_on_the_seed_and_not_on_its_neighbour(folder):
    orders = [sequence(settings(folder), 3 * 23, seed) for seed in (0, 1, 2**40)]
    epochs = {tuple(order[i : i + 23]) for order in orders for i in (0, 23, 46)}
    assert len(epochs) == 9
    assert sequence(settings(folder), 23, seed=1) == orders[1][:23]


def test_without_shuffling_windows_come_in_order(folder):
    in_order = list(range(1, 93, LENGTH))
    assert sequence(settings(folder, shuffle=False), 46) == in_order * 2


def test_windows_arrive_whole(folder):
    data = settings(folder)
    (dataset,) = open_datasets(data, "train")
    expected = {int(window["tokens"][0]): window for window in dataset}
    batches = training_batches(data, batch_size=5, seed=3)
    for batch in itertools.islice(batches, 10):
        assert batch["tokens"].shape == batch["segment_ids"].shape == (5, LENGTH + 1)
        assert batch["tokens"].dtype == batch["segment_ids"].dtype == np.int32
        for tokens, segment_ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
            np.testing.assert_array_equal(tokens, expected[int(tokens[0])]["tokens"])
            np.testing.assert_array_equal(segment_ids, expected[int(tokens[0])]["segment_ids"])
    batches.close()


@pytest.mark.parametrize(("batch_size", "hosts"), [(1, 1), (6, 1), (6, 2), (6, 3), (46, 2)])
def test_resuming_at_any_sample_with_any_batch_and_hosts(batch_size, hosts, folder):
    data = settings(folder, prefetch=2)
    whole = sequence(data, 46 + 2 * batch_size)
    for start in range(47):
        hosts_batches = [
            training_batches(
                data,
                batch_size=batch_size,
                seed=0,
                start_sample=start,
                process_index=host,
                process_count=hosts,
            )
            for host in range(hosts)
        ]
        rows = [first for step in range(2) for batches in hosts_batches for first in firsts(next(batches))]
        for batches in hosts_batches:
            batches.close()
        assert rows == whole[start : start + 2 * batch_size]


def test_more_hosts_than_files(write_dataset):
    folder = write_dataset("one", [numbered_documents([41], first=1)])
    hosts = [
        training_batches(settings(folder), batch_size=3, seed=0, process_index=i, process_count=3) for i in range(3)
    ]
    rows = [take(host, 10) for host in hosts]
    assert all(len(host) == 10 for host in rows)
    in_order = [first for step in zip(*rows, strict=True) for first in step]
    assert sorted(in_order[:10]) == list(range(1, 41, LENGTH))


def test_batch_not_divisible_by_hosts(folder):
    with pytest.raises(UserError) as error:
        training_batches(settings(folder), batch_size=4, seed=0, process_count=3)
    assert str(error.value) == (
        "training.batch_size: 4 is not divisible by the number of hosts, 3; choose a multiple of it"
    )


@pytest.fixture
def two_folders(folder, write_dataset):
    """The second set has 10 windows, whose tokens are 500 and up."""
    return folder, write_dataset("second", [numbered_documents([41], first=500)])


def test_mixture_without_weights_is_in_proportion_to_size(two_folders):
    rows = sequence(settings(*two_folders), 66)
    everything = [*range(1, 93, LENGTH), *range(500, 540, LENGTH)]
    assert sorted(rows[:33]) == everything
    assert sorted(rows[33:]) == everything
    assert rows[:33] != rows[33:]


def test_mixture_with_weights(two_folders):
    rows = sequence(settings(*two_folders, weights=[1.0, 3.0]), 800)
    second = [row for row in rows if row >= 500]
    first = [row for row in rows if row < 500]
    assert len(second) == pytest.approx(600, abs=2)
    # The proportion holds at every point, not only in the end.
    for stop in range(8, 800, 8):
        assert abs(sum(row >= 500 for row in rows[:stop]) - 0.75 * stop) <= 2
    # Each set goes through all its windows before it repeats one.
    for part, windows in ((first, 23), (second, 10)):
        for i in range(0, len(part) - windows, windows):
            assert len(set(part[i : i + windows])) == windows


def test_mixture_resumes(two_folders):
    data = settings(*two_folders, weights=[2.0, 1.0])
    whole = sequence(data, 80)
    for start in (0, 1, 33, 34, 60):
        assert take(training_batches(data, batch_size=4, seed=0, start_sample=start), 5) == whole[start : start + 20]


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [4, 8, 16])
def test_evaluation_covers_the_held_out_split_once(batch_size, hosts, folder):
    rows, padding, counts = [], 0, set()
    per_host = []
    for host in range(hosts):
        batches = evaluation_batches(settings(folder), batch_size=batch_size, process_index=host, process_count=hosts)
        per_host.append(list(batches))
        counts.add(len(per_host[-1]))
    for step in zip(*per_host, strict=True):
        for batch in step:
            assert batch["tokens"].shape == (batch_size // hosts, LENGTH + 1)
            real = batch["segment_ids"][:, 0] > 0
            assert not batch["segment_ids"][~real].any()
            assert not batch["tokens"][~real].any()
            rows += batch["tokens"][real, 0].tolist()
            padding += int((~real).sum())
    assert counts == {-(-7 // batch_size)}
    assert rows == list(range(1001, 1026, LENGTH))
    assert padding == -7 % batch_size


def test_evaluation_of_several_sets(folder, write_dataset):
    second = write_dataset("second", [[[1, 2]]], [numbered_documents([9], first=2001)])
    third = write_dataset("third", [[[1, 2]]])
    batches = evaluation_batches(settings(folder, second, third), batch_size=2)
    rows = collections.Counter(first for batch in batches for first in firsts(batch))
    assert rows == collections.Counter([*range(1001, 1026, LENGTH), 2001, 2005, 0])


def test_evaluation_without_held_out_text(write_dataset):
    assert list(evaluation_batches(settings(write_dataset("set", [[[1, 2]]])), batch_size=2)) == []


def test_a_set_of_one_window_repeats(write_dataset):
    assert sequence(settings(write_dataset("set", [[[5, 6]]])), 4) == [5] * 4


@pytest.mark.parametrize("prefetch", [1, 16])
def test_closing_stops_the_threads(prefetch, folder):
    before = set(threading.enumerate())
    batches = training_batches(settings(folder, prefetch=prefetch), batch_size=2, seed=0)
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_errors_come_with_the_call_and_not_with_the_first_batch(tmp_path):
    with pytest.raises(UserError, match="no prepared data set here"):
        training_batches(settings(tmp_path / "none"), batch_size=2, seed=0)
    with pytest.raises(UserError, match="no prepared data set here"):
        evaluation_batches(settings(tmp_path / "none"), batch_size=2)


def test_no_path():
    with pytest.raises(UserError) as error:
        open_datasets(DataConfig(), "train")
    assert str(error.value) == ("data.paths: no data set; name a folder written by `python -m orthros_jax prepare`")


def test_training_split_without_a_label(write_dataset):
    folder = write_dataset("set", [[[1]]])
    with pytest.raises(UserError) as error:
        open_datasets(settings(folder), "train")
    assert str(error.value) == (
        f"{folder}: its training split is a single token, nothing to predict; prepare more text"
    )


def test_vocabulary_larger_than_the_model(write_dataset):
    folder = write_dataset("set", [[[1, 2]]], vocab_size=300)
    datasets = open_datasets(settings(folder), "train")
    check_vocabulary(datasets, 300)
    with pytest.raises(UserError) as error:
        check_vocabulary(datasets, 299)
    assert str(error.value) == (
        f"{folder}: tokenizer hand has 300 entries, more than model.vocab_size 299; set model.vocab_size to "
        "at "
        "least 300, or prepare the data with a smaller tokenizer"
    )


def test_sets_of_different_tokenizers(write_dataset):
    one, two = write_dataset("one", [[[1, 2]]]), write_dataset("two", [[[1, 2]]], fingerprint="g")
    with pytest.raises(UserError) as error:
        check_vocabulary(open_datasets(settings(one, two), "train"), 60000)
    assert str(error.value) == (
        f"{two}: made with tokenizer hand, but {one} with another one, hand; prepare both with the same tokenizer"
    )
