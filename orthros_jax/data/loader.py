"""Batches for training and evaluation, on Grain's random-access data sets.

Training reads one endless sequence of samples: for each epoch a permutation of all windows, drawn from the seed and the
epoch's number. A position in it is a count of samples and nothing else, so a run continues exactly with another batch
size or another number of hosts.
"""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from orthros_jax.config import DataConfig
from orthros_jax.data.dataset import TokenDataset
from orthros_jax.errors import UserError

Batch = dict[str, np.ndarray]
# Copying windows out of mapped files is quick; more threads only contend for the interpreter lock.
READ_THREADS = 2


def open_datasets(data: DataConfig, split: str) -> list[TokenDataset]:
    """Opens the split of every data set in `data.paths`.

    Raises:
      UserError: no path, a data set that cannot be read, or one whose training split has no window.
    """
    if not data.paths:
        raise UserError("data.paths: no data set; name a folder written by `python -m orthros_jax prepare`")
    datasets = [TokenDataset(path, split, data.sequence_length) for path in data.paths]
    for dataset in datasets:
        if split == "train" and not len(dataset):
            raise UserError(
                f"{dataset.path}: the training split has {dataset.tokens} tokens, too few for one label; "
                "prepare more text"
            )
    return datasets


def check_vocabulary(datasets: Sequence[TokenDataset], vocab_size: int) -> None:
    """Raises:
    UserError: a data set has ids that a model of `vocab_size` entries does not know, or two were made with different
      tokenizers.
    """
    for dataset in datasets:
        if dataset.vocab_size > vocab_size:
            raise UserError(
                f"{dataset.path}: tokenizer {dataset.tokenizer_name} has {dataset.vocab_size} entries, more than "
                f"model.vocab_size {vocab_size}; set model.vocab_size to at least {dataset.vocab_size}, or prepare "
                "the data with a smaller tokenizer"
            )
        if dataset.fingerprint != datasets[0].fingerprint:
            raise UserError(
                f"{dataset.path}: made with tokenizer {dataset.tokenizer_name}, but {datasets[0].path} with "
                f"{datasets[0].tokenizer_name}; prepare both with the same one"
            )


def training_batches(
    data: DataConfig,
    *,
    batch_size: int,
    seed: int,
    start_sample: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Iterates this host's rows of each global batch, for ever.

    Step s covers samples start_sample + s B to start_sample + (s + 1) B of the global sequence; host p of P gets the
    p-th of P equal runs of them. Without `data.weights` an epoch visits each window of each data set once; with them,
    every data set repeats by itself and samples alternate in those proportions.

    Args:
      data: what to read.
      batch_size: global batch B in sequences.
      seed: seed of the order.
      start_sample: position in the global sequence, in samples.
      process_index: this host.
      process_count: number of hosts P; divides B.

    Returns:
      Iterator of {"tokens": [B / P, T + 1] int32, "segment_ids": [B / P, T + 1] int32}. Closing it stops its threads.

    Raises:
      UserError: as `open_datasets`, or P does not divide B.
    """
    samples = _global_order(data, open_datasets(data, "train"), seed)
    rows = _rows(batch_size, process_index, process_count)
    steps = (len(samples) - start_sample) // batch_size
    return _read(_HostBatches(samples, steps, start_sample, batch_size, rows), data.prefetch)


def evaluation_batches(
    data: DataConfig, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Iterates this host's rows of the held-out split: every window once, in order.

    Every host gets ceil(windows / B) batches; rows past the end are padding, with segment id 0. No held-out text gives
    no batch. Arguments, rows and errors as in `training_batches`.
    """
    datasets = [dataset for dataset in open_datasets(data, "heldout") if len(dataset)]
    rows = _rows(batch_size, process_index, process_count)
    if not datasets:
        return iter(())
    samples = grain.MapDataset.concatenate([grain.MapDataset.source(dataset) for dataset in datasets])
    steps = -(-len(samples) // batch_size)
    return _read(_HostBatches(samples, steps, 0, batch_size, rows), data.prefetch)


def documents_per_window(datasets: Sequence[TokenDataset]) -> float:
    """Mean number of documents, whole or in part, in a window; 0 where there is no window."""
    windows = sum(len(dataset) for dataset in datasets)
    # Every document but a stream's first starts at a token that is a label, and so inside exactly one window.
    starts = sum(dataset.documents - 1 for dataset in datasets if len(dataset))
    return 1 + starts / windows if windows else 0.0


def bytes_per_token(datasets: Sequence[TokenDataset]) -> float | None:
    """UTF-8 bytes of text for each predicted token, the divisor of bits per byte; None where nothing is predicted.

    All tokens count but the first of each document, which is never a label. With BOS that is exact; without, the text
    of the first token is counted though nothing predicts it.
    """
    labels = sum(dataset.tokens - dataset.documents for dataset in datasets)
    return sum(dataset.text_bytes for dataset in datasets) / labels if labels else None


def _global_order(data: DataConfig, datasets: list[TokenDataset], seed: int) -> grain.MapDataset:
    sources = [grain.MapDataset.source(dataset) for dataset in datasets]
    if not data.weights:
        sources = [grain.MapDataset.concatenate(sources)]
    if data.shuffle:
        # Shuffle before repeat: the other order would mix epochs.
        sources = [source.shuffle(seed=_derived_seed(seed, i)) for i, source in enumerate(sources)]
    repeated = [source.repeat() for source in sources]
    return grain.MapDataset.mix(repeated, data.weights) if data.weights else repeated[0]


def _derived_seed(seed: int, stream: int) -> int:
    """Grain adds the epoch to its 32-bit seed, so neighbouring seeds must not be neighbours there."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


def _rows(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size % process_count:
        raise UserError(f"training.batch_size: {batch_size} is not divisible by the {process_count} hosts")
    size = batch_size // process_count
    return range(process_index * size, (process_index + 1) * size)


class _HostBatches:
    """Random access to batches: number s stacks the samples first + s B + r for this host's rows r."""

    def __init__(self, samples: grain.MapDataset, steps: int, first: int, batch_size: int, rows: range):
        self._samples = samples
        self._size = len(samples)
        self._steps = steps
        self._first = first
        self._batch_size = batch_size
        self._rows = rows

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        start = self._first + step * self._batch_size
        windows = [self._samples[start + row] for row in self._rows if start + row < self._size]
        padding = len(self._rows) - len(windows)
        like = windows[0] if windows else self._samples[0]
        return {
            name: np.stack([window[name] for window in windows] + [np.zeros_like(like[name])] * padding)
            for name in like
        }


def _read(batches: _HostBatches, prefetch: int) -> Iterator[Batch]:
    options = grain.ReadOptions(num_threads=min(READ_THREADS, prefetch), prefetch_buffer_size=prefetch)
    iterator = iter(grain.MapDataset.source(batches).to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()
