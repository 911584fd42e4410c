"""The command `export`: a checkpoint of a run becomes a Hugging Face folder. Needs no PyTorch."""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from orthros_jax.config import Config
from orthros_jax.config_reader import load_config
from orthros_jax.convert.folder import new_folder, require_new
from orthros_jax.convert.hf_config import CONFIG_FILE, from_model_config
from orthros_jax.convert.model_card import model_card
from orthros_jax.data.kept_tokenizer import (
    CARRIED_FILES,
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    json_vocabulary,
    kept_tokenizer,
    opens_with,
)
from orthros_jax.data.storage import read_json
from orthros_jax.data.tokenizer import TOKENIZER_FILE
from orthros_jax.errors import UserError

PYTORCH_FILES = ("configuration_orthros.py", "modeling_orthros.py")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def export_model(
    run: Path | str,
    output: Path | str,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    shard_bytes: int = 5 * 10**9,
) -> int:
    """Writes a model folder from a checkpoint, tensor by tensor.

    As in evaluation, the averaged parameters are taken where the run has them.

    Args:
      run: run folder.
      output: model folder, which must not exist or be empty.
      step: the checkpoint; None is the newest readable one.
      dtype: type of the tensors, `bfloat16` or `float32`.
      shard_bytes: size of a safetensors file, at most, unless one tensor is larger.

    Returns:
      The step that was written.

    Raises:
      UserError: something is wrong with either folder; nothing is left behind.
    """
    run, output = Path(run), Path(output)
    require_new(output)
    config = _run_config(run)
    tokenizer, bos = kept_tokenizer(run)

    # Imported where the quick checks have passed: they take seconds to load.
    import numpy as np

    from orthros_jax.convert import tensors
    from orthros_jax.convert.safetensors_files import Output, numpy_dtype, write_tensors

    restored = _restore(run, config, step)
    (params,) = restored.state.values()
    flat = tensors.flattened(params)
    target = numpy_dtype(dtype)

    def outputs():
        for entry in tensors.entries(config.model):

            def make(entry=entry):
                parameter = flat[entry.path]
                return entry.to_file(np.asarray(parameter if entry.layer is None else parameter[entry.layer]))

            yield Output(entry.name, target, entry.file_shape, make)

    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    with new_folder(output) as folder:
        _write_json(folder / CONFIG_FILE, from_model_config(config.model, dtype) | ids)
        _write_tokenizer(run, folder, tokenizer, bos)
        if config.model.kind == "orthros":
            for name in PYTORCH_FILES:
                shutil.copyfile(Path(__file__).parent / "pytorch" / name, folder / name)
        card = model_card(config, restored.metadata, restored.step, tokenizer.name, dtype)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_tensors(folder, list(outputs()), shard_bytes)
    return restored.step


def parse_size(text: str) -> int:
    """`5GB`, `200MB`, `40KB` or a number of bytes.

    Raises:
      UserError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B|)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise UserError(f"--shard-size {text}: not a size; write for example 5GB or 500MB")
    return size


def _run_config(run: Path) -> Config:
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; name the run_dir of a training run or of an import")
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: no config.yaml here, so this is no run; name the run_dir of a training run")
    return load_config(run / "config.yaml")


def _restore(run: Path, config: Config, step: int | None):
    import jax
    from jax.sharding import SingleDeviceSharding

    from orthros_jax.convert import tensors
    from orthros_jax.training.checkpoint import Checkpoints, read_metadata

    # An imported model is not averaged before its first step of training.
    newest = read_metadata(run / "checkpoints")
    is_trained = newest is not None and newest[1]["data"] is not None and step != 0
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)
        for path, leaf in tensors.parameter_shapes(config.model).items()
    }
    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_every=None)
    target = {"ema" if is_trained and config.optimizer.ema_decay else "params": tensors.nested(shapes)}
    restored = checkpoints.restore(target, partial=True, step=step)
    if restored is None:
        raise UserError(f"{checkpoints.directory}: no checkpoint that can be read; train the run until one is saved")
    return restored


def _write_tokenizer(run: Path, folder: Path, tokenizer, bos: bool) -> None:
    """Tokenizer files and generation_config.json: an imported model's as they were, else made for transformers."""
    for name in CARRIED_FILES:
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    content = (run / TOKENIZER_FILE).read_bytes()
    spelled = {i: token for token, i in json_vocabulary(content).items()}
    if opens_with(content, tokenizer.bos_id) != bos:
        content = _with_bos(content, spelled[tokenizer.bos_id] if bos else None, tokenizer.bos_id)
    (folder / TOKENIZER_FILE).write_bytes(content)
    if not (folder / GENERATION_CONFIG_FILE).exists():
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.eos_id,
        }
        _write_json(folder / GENERATION_CONFIG_FILE, {key: i for key, i in ids.items() if i is not None})
        settings = read_json(folder / TOKENIZER_CONFIG_FILE) if (folder / TOKENIZER_CONFIG_FILE).exists() else {}
        if "pad_token" not in settings:
            _write_json(folder / TOKENIZER_CONFIG_FILE, settings | {"pad_token": spelled.get(tokenizer.eos_id)})


def _with_bos(content: bytes, bos: str | None, bos_id: int | None) -> bytes:
    """A tokenizer.json whose post-processor puts BOS before a text, or nothing for None."""
    document: dict[str, Any] = json.loads(content)
    document["post_processor"] = None
    if bos is not None:
        special, first, second = (
            {"SpecialToken": {"id": bos, "type_id": 0}},
            *({"Sequence": {"id": name, "type_id": 0}} for name in "AB"),
        )
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [special, first],
            "pair": [special, first, second],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    return json.dumps(document, indent=1, ensure_ascii=False).encode()


def _write_json(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    """The command line. Raises what `export_model` raises; a wrong argument exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m orthros_jax export",
        description="Turn a checkpoint of a run into a Hugging Face folder for transformers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", required=True, help="run folder")
    add("--output", required=True, help="model folder to make")
    add("--step", type=int, help="checkpoint to write (default: the newest readable one)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the tensors (default: bfloat16)")
    add("--shard-size", default="5GB", help="largest size of a safetensors file (default: 5GB)")
    arguments = parser.parse_args(argv)
    step = export_model(
        arguments.run,
        arguments.output,
        step=arguments.step,
        dtype=arguments.dtype,
        shard_bytes=parse_size(arguments.shard_size),
    )
    print(f"{arguments.output}: step {step:,} in {arguments.dtype}")
