"""A model from the disk, with what it takes to prompt it: settings, parameters, tokenizer, stop tokens."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from orthros_jax.config import Config, ModelConfig
from orthros_jax.config_reader import load_config
from orthros_jax.convert.hf_config import CONFIG_FILE, ORTHROS, read_hf_config, to_model_config
from orthros_jax.convert.load import load_hf
from orthros_jax.data.kept_tokenizer import GENERATION_CONFIG_FILE, kept_tokenizer
from orthros_jax.data.tokenizer import TOKENIZER_FILE, Tokenizer
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


def open_run(run_dir: Path | str, *, step: int | None = None) -> StoredModel:
    """Opens a run of `train.py` or an imported model.

    Args:
      run_dir: its folder.
      step: the checkpoint to read; None is the newest readable one. As in evaluation, the averaged parameters are taken
        where the run has them.

    Raises:
      UserError: no run, no such checkpoint, or no tokenizer that fits.
    """
    run_dir = Path(run_dir)
    config = _run_config(run_dir)
    if read_metadata(run_dir / "checkpoints") is None:
        raise UserError(f"{run_dir}: no checkpoint in this run; train it until one is saved")
    return _stored(run_dir, config.model, lambda mesh: _read_checkpoint(run_dir, config, step, mesh))


def open_model(folder: Path | str) -> StoredModel:
    """Opens a Hugging Face folder: an exported Orthros, or the original of a Llama or Qwen3.

    Raises:
      UserError: whatever is wrong with the folder, by file and entry.
    """
    folder = Path(folder)
    document = read_hf_config(folder)
    kind = None if document.get("model_type") == ORTHROS else "transformer"
    # The type that such files are in nearly always, and in which the engine computes.
    dtype = ModelConfig.compute_dtype
    config = to_model_config(document, str(folder / CONFIG_FILE), kind, param_dtype=dtype)
    return _stored(folder, config, lambda mesh: load_hf(folder, kind, dtype, mesh)[1])


def _stored(folder: Path, config: ModelConfig, read: Callable[[Mesh | None], dict]) -> StoredModel:
    tokenizer, bos = kept_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder / TOKENIZER_FILE}: has {tokenizer.vocab_size} entries, more than the {config.vocab_size} of the "
            "model; put the tokenizer that it was trained with in this place"
        )
    # How attention is computed and what is recomputed are choices of the machine and of training.
    config = dataclasses.replace(config, attention_impl="auto", remat="none")
    return StoredModel(config, tokenizer, bos, _stop_ids(folder, tokenizer), read)


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokenizer's EOS and what a generation_config.json names beside it, one id or a list of them."""
    path = folder / GENERATION_CONFIG_FILE
    named = None
    if path.is_file():
        try:
            named = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError):
            raise UserError(f"{path}: not a generation configuration; repair it or move it away") from None
    ids = [i for i in (tokenizer.eos_id, *(named if isinstance(named, list) else [named])) if i is not None]
    if not all(type(i) is int for i in ids):
        raise UserError(f"{path}: eos_token_id must be a token id or a list of them; repair it or move it away")
    return frozenset(ids)


def _run_config(run_dir: Path) -> Config:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; name the run_dir of a training run")
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: no config.yaml here, so this is no run; name the run_dir of a training run")
    return load_config(run_dir / "config.yaml")


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
