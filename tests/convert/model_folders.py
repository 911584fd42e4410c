"""Small run folders and model folders for the tests of import and export."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from orthros_jax.config import Config, DataConfig, ModelConfig, to_dict
from orthros_jax.config_reader import save_config
from orthros_jax.convert import tensors
from orthros_jax.convert.export_command import export_model
from orthros_jax.data.tokenizer import byte_tokenizer_file
from orthros_jax.model import build_model
from orthros_jax.streams import Layout
from orthros_jax.training.checkpoint import Checkpoints
from tests.model import small as model_tests

VOCABULARY = 258
ROWS = 24
# A rotation that llama3 scaling changes within a few rows.
LLAMA3 = {"rope_scaling": "llama3", "rope_original_length": 16}


def small_config(**changes: Any) -> ModelConfig:
    """That of the model's tests, for the byte tokenizer."""
    return model_tests.small_config(**({"vocab_size": VOCABULARY, "max_sequence_length": 64} | changes))


def random_params(config: ModelConfig, seed: int = 0) -> dict:
    """Weights of order 1 after each product; scales, norms and offsets far from identity."""
    random = np.random.default_rng(seed)

    def draw(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        noise = random.normal(size=shape)
        if path[-1] in ("scale", "gamma"):
            return 1 + 0.3 * noise
        if path[-1] == "beta":
            return 0.5 * noise
        if path[0] == "embedding":
            # As an output head it must not give logits of a higher order than the others.
            return noise if not config.tie_embeddings else noise / np.sqrt(config.model_dim)
        return noise / np.sqrt(config.model_dim)

    shapes = tensors.parameter_shapes(config)
    return tensors.nested({path: jnp.asarray(draw(path, leaf.shape), leaf.dtype) for path, leaf in shapes.items()})


def random_tokens(batch: int = 2, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (batch, rows)).astype(np.int32)


def logits(config: ModelConfig, params: dict, layout: Layout) -> np.ndarray:
    graph, _ = nnx.split(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))))

    def compute(params):
        model = nnx.merge(graph, params)
        return model.logits(model(layout))

    # Compiling takes far longer than running; without optimisation it takes half the time.
    options = {"xla_backend_optimization_level": 0}
    return np.asarray(jax.jit(compute, compiler_options=options)(params).astype(jnp.float32))


def write_run(folder: Path, config: ModelConfig, params: dict, *, add_bos: bool = True) -> Path:
    """A run folder with a checkpoint of step 3 and the byte tokenizer."""
    folder.mkdir()
    settings = Config(run_dir=str(folder), model=config, data=DataConfig(sequence_length=32))
    metadata = {"config": to_dict(settings), "data": [["fingerprint", 1000, 20, 990]], "flops": 2e9, "origin": None}
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1, keep_every=None)
    checkpoints.save(3, {"params": params}, metadata, wait=True)
    checkpoints.close()
    save_config(settings, folder / "config.yaml")
    write_tokenizer(folder, add_bos=add_bos)
    return folder


def write_tokenizer(folder: Path, *, add_bos: bool = True) -> None:
    (folder / "tokenizer.json").write_bytes(byte_tokenizer_file())
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": add_bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_model(folder: Path, config: ModelConfig, params: dict, **options: Any) -> Path:
    """A model folder, by way of a run; float32 unless told otherwise."""
    run = write_run(folder.with_name(f"{folder.name}_run"), config, params)
    settings: dict[str, Any] = {"dtype": "float32"} | options
    export_model(run, folder, **settings)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Changes entries of a JSON file; None as a value removes the entry."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def assert_same_bits(a: dict, b: dict) -> None:
    def check(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    jax.tree.map(check, a, b)
