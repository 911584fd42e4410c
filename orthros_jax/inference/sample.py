"""A short continuation of a prompt, by one prefill a token: enough to look at a model during training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from orthros_jax import streams


def sample_continuation(
    graph: nnx.GraphDef,
    params,
    prompt: np.ndarray,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    copies: int = 1,
) -> np.ndarray:
    """Samples `num_tokens` ids after `prompt`.

    Every token costs a forward pass over the whole sequence.

    Args:
      graph, params: structure and parameters of the model.
      prompt: [n] token ids, n >= 1.
      temperature: divisor of the logits.
      copies: rows of the batch, all alike; a mesh needs one for each batch shard.

    Returns:
      [num_tokens] ids.
    """
    buffer = np.zeros((copies, len(prompt) + num_tokens), np.int32)
    buffer[:, : len(prompt)] = prompt
    filled = _fill(graph, params, jnp.asarray(buffer), len(prompt), temperature, jax.random.key(seed))
    return np.asarray(jax.device_get(filled))[0, len(prompt) :]


@partial(jax.jit, static_argnums=(0, 3))
def _fill(graph, params, buffer, prompt_length, temperature, key):
    model = nnx.merge(graph, params)

    def append(length, buffer):
        layout = streams.prefill(buffer, jnp.full(buffer.shape[0], length))
        logits = model.logits(model(layout)[:, 0]).astype(jnp.float32)
        token = jax.random.categorical(jax.random.fold_in(key, length), logits[0] / temperature)
        return buffer.at[:, length].set(token.astype(buffer.dtype))

    return jax.lax.fori_loop(prompt_length, buffer.shape[1], append, buffer)
