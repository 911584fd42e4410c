"""Windows against a brute-force reference, and the mistakes that opening a data set reports."""

import collections
import json
import os

import numpy as np
import pytest
from synthetic import into_shards, numbered_documents

from benchmarks.large_data import resident_mib, write_sparse
from orthros_jax.data import dataset as dataset_module
from orthros_jax.data.dataset import TokenDataset
from orthros_jax.data.loader import bytes_per_token, documents_per_window
from orthros_jax.errors import UserError


def reference_windows(documents, length):
    """Windows by the definition, one token at a time."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    windows = []
    start = 0
    while start + 1 < len(stream):
        rows = stream[start : start + length + 1]
        tokens = [token for token, _ in rows] + [0] * (length + 1 - len(rows))
        order = list(dict.fromkeys(number for _, number in rows))
        segments = [order.index(number) + 1 for _, number in rows] + [0] * (length + 1 - len(rows))
        windows.append((tokens, segments))
        start += length
    return windows


def counted_labels(dataset):
    """How often each token is a label with weight, as the model's targets weigh it."""
    counts = collections.Counter()
    for window in dataset:
        tokens, segments = window["tokens"], window["segment_ids"]
        for t in range(len(tokens) - 1):
            if segments[t] and segments[t] == segments[t + 1]:
                counts[int(tokens[t + 1])] += 1
    return counts


CASES = {
    "one document of T + 1": ([5], 4),
    "one document of T": ([4], 4),
    "one token more than whole windows": ([9], 4),
    "two tokens more": ([10], 4),
    "a document ends with each window": ([4, 4, 4], 4),
    "a document starts at each window's last row": ([5, 4, 4, 1], 4),
    "documents of one token": ([1, 1, 1, 1, 1, 1, 1], 3),
    "one token between long ones": ([7, 1, 7, 1], 4),
    "two tokens": ([2], 4),
    "longer than every document": ([2, 3], 64),
    "window of one label": ([3, 1, 2], 1),
}


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_windows_at_boundaries(case, shards, write_dataset):
    lengths, length = CASES[case]
    check(write_dataset, numbered_documents(lengths, first=1), length, shards, "<u2")


@pytest.mark.parametrize("seed", range(30))
def test_windows_of_random_documents(seed, write_dataset):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, rng.choice([3, 8, 40]), size=rng.integers(1, 40))
    dtype = ["<u2", "<u4"][seed % 2]
    first = [1, 70000][seed % 2]
    documents = numbered_documents(lengths.tolist(), first=first)
    check(write_dataset, documents, int(rng.integers(1, 20)), int(rng.integers(1, 6)), dtype)


def check(write_dataset, documents, length, shards, dtype):
    folder = write_dataset("set", into_shards(documents, shards), dtype=dtype)
    dataset = TokenDataset(folder, "train", length)
    expected = reference_windows(documents, length)
    assert len(dataset) == len(expected)
    for i, (tokens, segments) in enumerate(expected):
        window = dataset[i]
        assert window["tokens"].dtype == window["segment_ids"].dtype == np.int32
        assert window["tokens"].tolist() == tokens
        assert window["segment_ids"].tolist() == segments
    # Nothing is lost and nothing counts twice: all tokens but the first of each document, once each.
    assert counted_labels(dataset) == collections.Counter(t for document in documents for t in document[1:])
    if expected:
        mean = np.mean([len(set(segments) - {0}) for _, segments in expected])
        assert documents_per_window([dataset]) == pytest.approx(mean)


def test_tokens_are_conserved_where_documents_repeat_them(write_dataset):
    documents = [[i] * i for i in range(10, 20)]
    dataset = TokenDataset(write_dataset("set", [documents]), "train", 7)
    seen = [int(dataset[0]["tokens"][0])]
    for window in dataset:
        seen += window["tokens"][1:][window["segment_ids"][1:] > 0].tolist()
    assert seen == [token for document in documents for token in document]


def test_label_after_a_document_has_no_weight(write_dataset):
    dataset = TokenDataset(write_dataset("set", [[[5, 6, 7], [8, 9, 10]]]), "train", 5)
    segments = dataset[0]["segment_ids"]
    assert segments.tolist() == [1, 1, 1, 2, 2, 2]
    assert (segments[1:] == segments[:-1]).tolist() == [True, True, False, True, True]


def test_a_single_token_has_no_window(write_dataset):
    assert len(TokenDataset(write_dataset("set", [[[3]]]), "train", 4)) == 0
    assert documents_per_window([TokenDataset(write_dataset("other", [[[3]]]), "train", 4)]) == 0


def test_empty_split_has_no_window_and_no_bytes_per_token(write_dataset):
    heldout = TokenDataset(write_dataset("set", [[[3, 4]]]), "heldout", 4)
    assert len(heldout) == 0
    assert bytes_per_token([heldout]) is None


def test_bytes_per_token_counts_labels_of_all_sets(write_dataset):
    one = TokenDataset(write_dataset("one", [[[1, 2, 3], [4]]]), "train", 2)
    two = TokenDataset(write_dataset("two", [[[1, 2, 3, 4, 5, 6]]]), "train", 2)
    assert bytes_per_token([one, two]) == pytest.approx((14 + 7) / (2 + 5))


def test_windows_outside_the_range_are_refused(write_dataset):
    dataset = TokenDataset(write_dataset("set", [[[1, 2, 3]]]), "train", 2)
    for window in (-1, 1):
        with pytest.raises(IndexError):
            dataset[window]


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_offsets_are_found_in_blocks(block, write_dataset, monkeypatch):
    """Windows end within, at the first and at the last offset of a block, and span several blocks."""
    monkeypatch.setattr(dataset_module, "_BLOCK", block)
    lengths = np.random.default_rng(block).integers(1, 9, 60).tolist()
    documents = numbered_documents([*lengths, 70, 1, 1, 1, 1, 1, 1, 1, 30], first=1)
    dataset = TokenDataset(write_dataset("set", into_shards(documents, 4)), "train", 7)
    found = [(w["tokens"].tolist(), w["segment_ids"].tolist()) for w in dataset]
    assert found == reference_windows(documents, 7)


def test_memory_does_not_grow_with_what_is_read(tmp_path):
    """2B tokens, 2M documents: mapped files would count as memory of the process page by page."""
    write_sparse(tmp_path / "set", 2_000_000_000, shards=8)
    dataset = TokenDataset(tmp_path / "set", "train", 2048)
    assert abs(dataset.tokens / dataset.documents - 1000) < 50
    windows = np.random.default_rng(0).integers(0, len(dataset), 20_000).tolist()
    tokens, segment_ids = np.zeros(2049, np.int32), np.zeros(2049, np.int32)
    dataset.read(windows[0], tokens, segment_ids)
    before = resident_mib("VmRSS")
    for window in windows:
        dataset.read(window, tokens, segment_ids)
    assert resident_mib("VmRSS") - before < 32


def test_a_file_that_shrinks_while_it_is_read(write_dataset):
    folder = write_dataset("set", [[[1, 2, 3, 4, 5]]])
    dataset = TokenDataset(folder, "train", 4)
    os.truncate(folder / "train-00000.tokens", 4)
    with pytest.raises(UserError, match=r"train-00000\.tokens: has become shorter while it is read; copy"):
        dataset[0]


def test_open_files_are_bounded(write_dataset, monkeypatch):
    monkeypatch.setattr(dataset_module, "OPEN_SHARDS", 4)
    documents = numbered_documents([3] * 40, first=1)
    dataset = TokenDataset(write_dataset("set", into_shards(documents, 40)), "train", 2)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(2):
        assert [w["tokens"].tolist() for w in dataset] == [t for t, _ in reference_windows(documents, 2)]
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * 4 + 2


def test_missing_folder(tmp_path):
    with pytest.raises(UserError) as error:
        TokenDataset(tmp_path / "none", "train", 4)
    assert str(error.value) == (
        f"{tmp_path}/none: no prepared data set here; make it with "
        f"`python -m orthros_jax prepare --input FILES --output {tmp_path}/none`"
    )


def test_unfinished_folder(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError) as error:
        TokenDataset(tmp_path, "train", 4)
    assert str(error.value) == (
        f"{tmp_path}: this data set is unfinished; run its `python -m orthros_jax prepare` command again"
    )


def test_index_of_another_version(write_dataset):
    folder = write_dataset("set", [[[1, 2]]])
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"version": 2}))
    with pytest.raises(UserError) as error:
        TokenDataset(folder, "train", 4)
    assert str(error.value) == (
        f"{folder}/index.json: format orthros-tokens version 2, but this program reads orthros-tokens "
        "version 1; "
        "prepare the data set again"
    )


def test_damaged_index(write_dataset):
    folder = write_dataset("set", [[[1, 2]]])
    (folder / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json: damaged: .*; delete the folder and prepare it again"):
        TokenDataset(folder, "train", 4)


@pytest.mark.parametrize("suffix", ["tokens", "offsets"])
def test_truncated_shard(suffix, write_dataset):
    folder = write_dataset("set", [[[1, 2, 3], [4]]])
    file = folder / f"train-00000.{suffix}"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(UserError) as error:
        TokenDataset(folder, "train", 4)
    assert str(error.value) == (
        f"{file}: {size - 1} bytes, but the index says {size}; copy the data set again, or delete it and "
        "prepare "
        "it again"
    )


def test_missing_shard(write_dataset):
    folder = write_dataset("set", [[[1, 2, 3], [4]]])
    (folder / "train-00000.offsets").unlink()
    with pytest.raises(UserError, match=r"train-00000\.offsets: missing; copy the data set again"):
        TokenDataset(folder, "train", 4)
