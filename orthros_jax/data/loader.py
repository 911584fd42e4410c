"""Batches for training and evaluation, in an order that Grain's random-access data sets define.

Training reads one endless sequence of samples: for each epoch a permutation of all windows, drawn from the
seed and the number of the epoch. A position in it is a count of samples and nothing else, so a run continues
exactly with another batch size or another number of hosts.
"""

import bisect
import itertools
import sys
from collections.abc import Generator, Sequence
from typing import Any

import grain
import numpy as np

from orthros_jax.config import DataConfig
from orthros_jax.data.dataset import TokenDataset
from orthros_jax.errors import UserError

Batch = dict[str, np.ndarray]
# Copying windows out of files is quick; more threads only contend for the interpreter lock.
READ_THREADS = 1


def open_datasets(data: DataConfig, split: str) -> list[TokenDataset]:
    """Opens the split ("train" or "heldout") of every data set in `data.paths`.

    Raises:
      UserError: no path, a data set that cannot be read, or one whose training split has no window.
    """
    if not data.paths:
        raise UserError("data.paths: no data set; name a folder written by `python -m orthros_jax prepare`")
    datasets = [TokenDataset(path, split, data.sequence_length) for path in data.paths]
    for dataset in datasets:
        if split == "train" and not len(dataset):
            raise UserError(
                f"{dataset.path}: its training split is a single token, nothing to predict; prepare more text"
            )
    return datasets


def check_vocabulary(datasets: Sequence[TokenDataset], vocab_size: int) -> None:
    """Compares the tokenizers of the data sets with each other and with the model.

    Raises:
      UserError: ids that a model of `vocab_size` entries does not have, or different tokenizers.
    """
    for dataset in datasets:
        if dataset.vocab_size > vocab_size:
            raise UserError(
                f"{dataset.path}: tokenizer {dataset.tokenizer_name} has {dataset.vocab_size} entries, more "
                f"than model.vocab_size {vocab_size}; set model.vocab_size to at least {dataset.vocab_size}, "
                "or prepare the data with a smaller tokenizer"
            )
        if dataset.fingerprint != datasets[0].fingerprint:
            raise UserError(
                f"{dataset.path}: made with tokenizer {dataset.tokenizer_name}, but {datasets[0].path} with "
                f"another one, {datasets[0].tokenizer_name}; prepare both with the same tokenizer"
            )


def training_batches(
    data: DataConfig,
    *,
    batch_size: int,
    seed: int,
    start_sample: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[Batch]:
    """Iterates this host's rows of each global batch, without end.

    Step s covers samples start_sample + s B to start_sample + (s + 1) B of the global sequence; host p of P
    gets the p-th of P equal runs of them. Without `data.weights` an epoch visits each window of each data set
    once; with them, each data set has its own epochs and samples alternate in those proportions.

    Args:
      data: what to read.
      batch_size: global batch B in sequences.
      seed: seed of the order.
      start_sample: position in the global sequence, in samples.
      process_index: this host.
      process_count: number of hosts P; divides B.

    Returns:
      Iterator of {"tokens": [B / P, T + 1] int32, "segment_ids": [B / P, T + 1] int32}. Closing it stops its
      threads.

    Raises:
      UserError: as `open_datasets`, or P does not divide B.
    """
    datasets = open_datasets(data, "train")
    rows = _host_rows(batch_size, process_index, process_count)
    order = _global_order([len(dataset) for dataset in datasets], data.weights, seed if data.shuffle else None)
    steps = (len(order) - start_sample) // batch_size
    return _read(_HostBatches(datasets, order, steps, start_sample, batch_size, rows), data.prefetch)


def evaluation_batches(
    data: DataConfig, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Generator[Batch]:
    """Iterates this host's rows of the held-out split: every window once, in order.

    Every host gets ceil(windows / B) batches; rows past the end are padding, with segment id 0. No held-out
    text gives no batch. Arguments, rows and errors are those of `training_batches`.
    """
    datasets = open_datasets(data, "heldout")
    rows = _host_rows(batch_size, process_index, process_count)
    windows = sum(len(dataset) for dataset in datasets)
    steps = -(-windows // batch_size)
    return _read(_HostBatches(datasets, range(windows), steps, 0, batch_size, rows), data.prefetch)


def documents_per_window(datasets: Sequence[TokenDataset]) -> float:
    """Mean number of documents, whole or in part, in a window; 0 where there is no window."""
    windows = sum(len(dataset) for dataset in datasets)
    # A document's first token, except the stream's, is a label and so adds a segment to exactly one window.
    starts = sum(dataset.documents - 1 for dataset in datasets if len(dataset))
    return 1 + starts / windows if windows else 0.0


def bytes_per_token(datasets: Sequence[TokenDataset]) -> float | None:
    """UTF-8 bytes of text for each predicted token, the divisor of bits per byte; None where there is none.

    All tokens count but the first of each document, which is never a label. With BOS that is exact; without,
    the text of the first token is counted though nothing predicts it.
    """
    labels = sum(dataset.tokens - dataset.documents for dataset in datasets)
    return sum(dataset.text_bytes for dataset in datasets) / labels if labels else None


class _Epochs:
    """The numbers start .. stop - 1 without end, each epoch in its own order; in order without a seed.

    The order of an epoch depends on the seed and the epoch's number alone. Grain's permutation is a function of the
    index, so nothing is stored.
    """

    def __init__(self, start: int, stop: int, seed: int | None):
        self._start, self._size, self._seed = start, stop - start, seed

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        epoch, index = divmod(index, self._size)
        if self._seed is not None:
            seed = (self._seed + epoch) % 2**32
            index = grain.experimental.index_shuffle(index, max_index=self._size - 1, seed=seed, rounds=4)
        return self._start + index


def _global_order(lengths: list[int], weights: list[float], seed: int | None) -> Any:
    """The endless sequence of window numbers, counted through all data sets; in file order without a seed."""
    bounds = np.cumsum([0, *lengths]).tolist() if weights else [0, sum(lengths)]
    streams = [
        _Epochs(start, stop, None if seed is None else _stream_seed(seed, i))
        for i, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    return grain.MapDataset.mix([grain.MapDataset.source(s) for s in streams], weights) if weights else streams[0]


def _stream_seed(seed: int, stream: int) -> int:
    """The epoch is added to the 32-bit seed, so seeds of neighbouring runs must lie far apart."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


def _host_rows(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size % process_count:
        raise UserError(
            f"training.batch_size: {batch_size} is not divisible by the number of hosts, {process_count}; "
            "choose a multiple of it"
        )
    size = batch_size // process_count
    return range(process_index * size, (process_index + 1) * size)


class _HostBatches:
    """Random access to batches: number s holds the samples order[first + s B + r] of this host's rows r."""

    def __init__(
        self,
        datasets: list[TokenDataset],
        order: Any,
        steps: int,
        first: int,
        batch_size: int,
        rows: range,
    ):
        self._datasets = datasets
        self._bounds = [0, *itertools.accumulate(len(dataset) for dataset in datasets)]
        self._order = order
        self._samples = len(order)
        self._steps = steps
        self._first = first
        self._batch_size = batch_size
        self._rows = rows

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        shape = (len(self._rows), self._datasets[0].sequence_length + 1)
        tokens, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        start = self._first + index * self._batch_size
        for i, row in enumerate(self._rows):
            if start + row < self._samples:
                window = self._order[start + row]
                source = bisect.bisect_right(self._bounds, window) - 1
                self._datasets[source].read(window - self._bounds[source], tokens[i], segment_ids[i])
        return {"tokens": tokens, "segment_ids": segment_ids}


def _read(batches: _HostBatches, prefetch: int) -> Generator[Batch]:
    if not len(batches):
        return
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=prefetch)
    iterator = iter(grain.MapDataset.source(batches).to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()
