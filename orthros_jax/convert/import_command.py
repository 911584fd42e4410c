"""The command `import`: a Hugging Face folder becomes a run folder with a checkpoint of step 0."""

import argparse
import dataclasses
import shutil
from pathlib import Path

from orthros_jax.config import CheckpointConfig, Config, DataConfig
from orthros_jax.config_reader import save_config
from orthros_jax.convert.folder import new_folder, require_new
from orthros_jax.convert.hf_config import CONFIG_FILE, ORTHROS, ImportKind, read_hf_config, to_model_config
from orthros_jax.data.kept_tokenizer import CARRIED_FILES, kept_tokenizer
from orthros_jax.data.tokenizer import TOKENIZER_FILE
from orthros_jax.errors import UserError


def import_model(model: Path | str, output: Path | str, kind: ImportKind | None = None) -> Config:
    """Makes a run out of a model folder; `train.py` continues it, and generation and export read it.

    The checkpoint holds the parameters alone, in float32; the optimizer starts anew.

    Args:
      model: folder with config.json, safetensors files and tokenizer.json.
      output: run folder, which must not exist or be empty.
      kind: what to make of a Llama or Qwen3: `orthros` (None means that too) or `transformer`.

    Returns:
      The settings of the run.

    Raises:
      UserError: something is wrong with either folder; nothing is left behind.
    """
    model, output = Path(model), Path(output)
    require_new(output)
    document = read_hf_config(model)
    settings = to_model_config(document, str(model / CONFIG_FILE), kind)
    tokenizer, _ = kept_tokenizer(model)
    if tokenizer.vocab_size > settings.vocab_size:
        raise UserError(
            f"{model / TOKENIZER_FILE}: has {tokenizer.vocab_size} entries, more than the vocab_size "
            f"{settings.vocab_size} of {CONFIG_FILE}; both must come from the same model"
        )
    data = DataConfig(sequence_length=min(DataConfig.sequence_length, settings.max_sequence_length))
    config = Config(run_dir=str(output), model=settings, data=data)

    # Imported where the quick checks have passed: they take seconds to load.
    import jax
    from jax.sharding import SingleDeviceSharding

    from orthros_jax.convert.load import read_parameters
    from orthros_jax.training.checkpoint import Checkpoints

    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    params = read_parameters(model, settings, lambda path, rank: host, document["model_type"] == ORTHROS)
    origin = {"model": model.resolve().name, "model_type": document["model_type"], "tokenizer": tokenizer.fingerprint}
    metadata = {"config": dataclasses.asdict(config), "data": None, "flops": 0.0, "origin": origin}
    with new_folder(output) as folder:
        for name in (TOKENIZER_FILE, *CARRIED_FILES):
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
        checkpoints = Checkpoints(folder / "checkpoints", keep_last=CheckpointConfig.keep_last, keep_every=None)
        checkpoints.save(0, {"params": params}, metadata, wait=True)
        checkpoints.close()
        save_config(config, folder / "config.yaml")
    return config


def main(argv: list[str]) -> None:
    """The command line. Raises what `import_model` raises; a wrong argument exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m orthros_jax import",
        description="Turn a Hugging Face folder of Llama or Qwen3 into a run folder, to train on or generate from.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="folder with config.json, safetensors files and tokenizer.json")
    parser.add_argument("--output", required=True, help="run folder to make")
    parser.add_argument(
        "--kind",
        choices=("orthros", "transformer"),
        help="orthros (default) or the model as it is, to compare with",
    )
    arguments = parser.parse_args(argv)
    config = import_model(arguments.model, arguments.output, arguments.kind)
    model = config.model
    print(
        f"{arguments.output}: {model.kind}, {model.num_layers} layers of {model.model_dim}, at step 0. Train on with\n"
        f"  python train.py --config {arguments.output}/config.yaml --data.paths '[PREPARED]' --training.steps N"
    )
