"""A model from the disk, with what it takes to prompt it: settings, parameters, tokenizer, stop tokens."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from orthros_jax.config import Config, ModelConfig
from orthros_jax.config_reader import load_config
from orthros_jax.data.dataset import dataset_tokenizer, read_index
from orthros_jax.data.tokenizer import Tokenizer, read_tokenizer
from orthros_jax.errors import UserError
from orthros_jax.model import build_model
from orthros_jax.sharding import state_shardings
from orthros_jax.training.checkpoint import Checkpoints, read_metadata


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, opened; its parameters are not read yet.

    Attributes:
      config: the model, with the settings that suit inference.
      tokenizer: the one that it was trained with.
      bos: whether a document opens with the tokenizer's BOS.
      stop_ids: tokens that end a document.
      read: reads the parameters (nested dictionary, training layout) onto a mesh, or onto the default device for None.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    bos: bool
    stop_ids: frozenset[int]
    read: Callable[[Mesh | None], dict]


def open_run(run_dir: Path | str, *, step: int | None = None, tokenizer: str | None = None) -> StoredModel:
    """Opens a run of `train.py`.

    Args:
      run_dir: its folder.
      step: the checkpoint to read; None is the newest readable one. As in evaluation, the averaged parameters are taken
        where the run has them.
      tokenizer: `byte` or a tokenizer.json in place of the one beside the run's data.

    Raises:
      UserError: no run, no such checkpoint, or no tokenizer that fits.
    """
    run_dir = Path(run_dir)
    config = _run_config(run_dir)
    metadata = read_metadata(run_dir / "checkpoints")
    if metadata is None:
        raise UserError(f"{run_dir}: no checkpoint in this run; train it until one is saved")
    if tokenizer is not None:
        found = read_tokenizer(tokenizer)
        bos = found.bos_id is not None
    else:
        found, bos = _data_tokenizer(run_dir, config, metadata[1]["data"])
    if found.vocab_size > config.model.vocab_size:
        raise UserError(
            f"tokenizer {found.name} has {found.vocab_size} entries, more than the {config.model.vocab_size} of the "
            "model; name the one that the model was trained with as --tokenizer"
        )
    return StoredModel(
        # How attention is computed and what is recomputed are choices of the machine and of training.
        dataclasses.replace(config.model, attention_impl="auto", remat="none"),
        found,
        bos,
        frozenset() if found.eos_id is None else frozenset({found.eos_id}),
        lambda mesh: _read_checkpoint(run_dir, config, step, mesh),
    )


def _run_config(run_dir: Path) -> Config:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; name the run_dir of a training run")
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: no config.yaml here, so this is no run; name the run_dir of a training run")
    return load_config(run_dir / "config.yaml")


def _data_tokenizer(run_dir: Path, config: Config, identity: list[list]) -> tuple[Tokenizer, bool]:
    """The tokenizer of the run's data and whether its documents open with BOS."""
    fix = "name the tokenizer that the run was trained with as --tokenizer"
    if not config.data.paths:
        raise UserError(f"{run_dir}: this run names no data to take the tokenizer from; {fix}")
    path = config.data.paths[0]
    try:
        tokenizer, bos = dataset_tokenizer(path), read_index(path)["bos"]
    except UserError as error:
        raise UserError(f"the run's tokenizer is that of its data, which cannot be read: {error}; or {fix}") from error
    if identity and tokenizer.fingerprint != identity[0][0]:
        raise UserError(f"{path}: this data has another tokenizer than the run in {run_dir} was trained with; {fix}")
    return tokenizer, bos


def _read_checkpoint(run_dir: Path, config: Config, step: int | None, mesh: Mesh | None) -> dict:
    model = nnx.eval_shape(lambda: build_model(config.model, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    target = {"ema" if config.optimizer.ema_decay else "params": params}
    if mesh is not None:
        target = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            target,
            state_shardings(target, mesh),
        )
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=1, keep_every=None)
    restored = checkpoints.restore(target, partial=True, step=step)
    if restored is None:
        raise UserError(f"{checkpoints.directory}: no checkpoint can be read; repair them, or train the run again")
    (params,) = restored.state.values()
    return params
