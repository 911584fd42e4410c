"""What a run keeps from its first start, and what may change when it is started again."""

import dataclasses
from collections.abc import Sequence

from orthros_jax.config import Config, ConfigError, to_dict
from orthros_jax.data.dataset import TokenDataset

# The arrays of a checkpoint have the shape that these give them, or stand for something else under other values.
_MODEL_MAY_CHANGE = {
    *("attention_impl", "remat", "unroll", "float8", "compute_dtype", "statistics_dtype"),
    *("max_sequence_length", "init_std"),
}
# The data cursor counts windows in the order that these define.
_DATA_KEPT = ("weights", "sequence_length", "shuffle")


def data_identity(datasets: Sequence[TokenDataset]) -> list[list]:
    """What tells the data sets of a run from others, wherever their folders are: tokenizer and sizes of each."""
    return [[d.fingerprint, d.tokens, d.documents, d.text_bytes] for d in datasets]


def keep_from_first_start(config: Config, saved: dict | None) -> Config:
    """The settings of this start, with the schedule's length of the first.

    A schedule that follows `training.steps` would stretch when a run is asked for more steps, and the learning rate
    would jump; so its length is settled at the first start and kept.

    Args:
      saved: metadata of the newest checkpoint, with "config" and "data", or None for a new run. An imported model has
        no data yet: this is its run's first start.

    Raises:
      ConfigError: a setting differs that must not; the message names both values.
    """
    optimizer = config.optimizer
    if saved is not None:
        _check_unchanged(to_dict(config), saved["config"], config.run_dir, with_data=saved["data"] is not None)
    if saved is None or saved["data"] is None:
        if optimizer.schedule_steps is None:
            # A run of a few steps, to try something out, stops within its warm-up.
            length = max(config.training.steps, optimizer.warmup_steps + optimizer.decay_steps)
            optimizer = dataclasses.replace(optimizer, schedule_steps=length)
        return dataclasses.replace(config, optimizer=optimizer)
    if optimizer.schedule_steps is None:
        optimizer = dataclasses.replace(optimizer, schedule_steps=saved["config"]["optimizer"]["schedule_steps"])
    return dataclasses.replace(config, optimizer=optimizer)


def check_same_data(identity: list[list], saved: dict | None, run_dir: str) -> None:
    """Compares `data_identity` of the training data with that of the first start.

    Raises:
      ConfigError: it is other data, or has another tokenizer than the imported model.
    """
    if saved is not None and saved["data"] is None:
        if any(fingerprint != saved["origin"]["tokenizer"] for fingerprint, *_ in identity):
            raise ConfigError(
                "data.paths",
                f"was prepared with another tokenizer than the model in {run_dir} has; prepare it with --tokenizer "
                f"{run_dir}/tokenizer.json",
            )
    elif saved is not None and identity != saved["data"]:
        raise ConfigError(
            "data.paths",
            f"holds other data than the run in {run_dir} was started with; give it the same data sets in the same "
            "order, or start a new run with another run_dir",
        )


def changed_settings(config: Config, saved: dict) -> list[str]:
    """One line for every setting that differs from the saved ones."""
    now = to_dict(config)
    return [
        f"{section}.{name}: {_text(saved[section].get(name))} -> {_text(value)}"
        for section, settings in now.items()
        if isinstance(settings, dict) and section in saved
        for name, value in settings.items()
        if saved[section].get(name) != value
    ]


def _check_unchanged(now: dict, saved: dict, run_dir: str, with_data: bool) -> None:
    kept = [("model", name) for name in now["model"] if name not in _MODEL_MAY_CHANGE]
    if with_data:
        kept += [("data", name) for name in _DATA_KEPT] + [("training", "seed")]
    for section, name in kept:
        before, after = saved[section].get(name), now[section][name]
        if before != after:
            raise ConfigError(
                f"{section}.{name}",
                f"{_text(after)} differs from {_text(before)}, with which the run in {run_dir} was started; "
                f"keep {_text(before)}, or start a new run with another run_dir",
            )


def _text(value) -> str:
    return "null" if value is None else str(value)
