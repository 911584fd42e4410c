"""Run folders without training: random parameters as checkpoints, and what a model of them would say."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from settings import make_config

from orthros_jax import streams
from orthros_jax.config import Config, to_dict
from orthros_jax.config_reader import save_config
from orthros_jax.data.kept_tokenizer import TOKENIZER_CONFIG_FILE
from orthros_jax.data.tokenizer import TOKENIZER_FILE, TRAINED_BOS, TRAINED_EOS, ByteTokenizer, byte_tokenizer_file
from orthros_jax.model import build_model
from orthros_jax.training.checkpoint import Checkpoints

LENGTH = 64
SETTINGS: dict[str, Any] = {
    "model.vocab_size": 260,
    "model.num_layers": 1,
    "model.model_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_dim": 24,
    "model.window": 6,
    "model.compute_dtype": "float32",
    "model.max_sequence_length": LENGTH,
    "data.sequence_length": 32,
}


def random_params(config: Config, seed: int) -> dict:
    """Drawn by NumPy, which compiles nothing."""
    model = nnx.eval_shape(lambda: build_model(config.model, nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.normal(scale=0.4, size=x.shape).astype(x.dtype), shapes)


def make_run(folder: Path, steps: dict[int, dict], config: Config) -> Path:
    """A run folder with a checkpoint for each step, of the given state, and the tokenizer of bytes."""
    folder.mkdir()
    save_config(config, folder / "config.yaml")
    (folder / TOKENIZER_FILE).write_bytes(byte_tokenizer_file())
    spelled = {"bos_token": TRAINED_BOS, "eos_token": TRAINED_EOS, "add_bos_token": True}
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(spelled))
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=9, keep_every=None)
    for step, state in steps.items():
        checkpoints.save(
            step,
            jax.tree.map(jax.device_put, state),
            {"config": to_dict(config), "data": None, "flops": 0.0, "origin": None},
        )
    checkpoints.close()
    return folder


def small_config(**changes: Any) -> Config:
    """Changes are written `section__name`."""
    return make_config(SETTINGS | {name.replace("__", "."): value for name, value in changes.items()})


@partial(jax.jit, static_argnums=0)
def _scores(graph, params, tokens, segment_ids):
    layout, _ = streams.pretraining(tokens, segment_ids)
    model = nnx.merge(graph, params)
    return model.logits(model(layout))


def greedy(config: Config, params: dict, prompt: list[int], max_tokens: int) -> list[int]:
    """The likeliest tokens after a prompt, by a whole forward pass as in pretraining for each; stops behind EOS."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: build_model(config.model, nnx.Rngs(0))), nnx.Param)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and tokens[-1] != ByteTokenizer.eos_id:
        rows = np.zeros((2, 1, LENGTH + 1), np.int32)
        rows[0, 0, : len(tokens)], rows[1, 0, : len(tokens)] = tokens, 1
        scores = np.asarray(_scores(graph, params, *rows))[0, len(tokens) - 1, : ByteTokenizer.vocab_size]
        second, first = np.sort(scores)[-2:]
        assert first - second > 1e-3, "a near tie: choose another seed"
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]
