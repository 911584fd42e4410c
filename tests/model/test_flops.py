"""A model's operations in closed form: by hand, by brute force over pairs, by the compiler's count."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orthros_jax import streams
from orthros_jax.config import ModelConfig
from orthros_jax.model.flops import forward_flops, sequence_flops, visible_pairs

from .small import fast_jit, graph_of, random_params, small_config


def test_eight_rows_with_a_window_of_four_see_26_keys():
    config = small_config(window=4)
    layout, _ = streams.pretraining(jnp.zeros((1, 9), jnp.int32))
    context, output = visible_pairs(config, layout)
    assert context == 26
    assert output == 36
    context, output = visible_pairs(dataclasses.replace(config, kind="sliding_window"), layout)
    assert (context, output) == (26, 26)
    context, output = visible_pairs(dataclasses.replace(config, kind="transformer"), layout)
    assert (context, output) == (36, 36)


def test_attention_counts_heads_times_head_size():
    """Width 2560 with 32 heads of 128: a pair costs 4 x 4096 operations a layer, not 4 x 2560."""
    config = ModelConfig(kind="transformer", num_layers=1, model_dim=2560, num_heads=32, num_kv_heads=8, head_dim=128)
    flops = forward_flops(config)
    assert flops.output_pair == 4 * 4096
    assert flops.context_pair == 0
    assert flops.context_row == 2 * 2560 * 2 * 8 * 128
    assert flops.output_row == 2 * (2 * 2560 * 4096 + 3 * 2560 * 3072 + 2560 * 32000)


def test_a_window_of_512_in_8192_rows():
    config = ModelConfig(kind="sliding_window", num_layers=1, window=512)
    wide = dataclasses.replace(config, kind="transformer")
    per_pair = 3 * 4 * 12 * 64
    difference = sequence_flops(wide, 8192) - sequence_flops(config, 8192)
    assert difference == per_pair * (8192 * 8193 // 2 - (512 * 513 // 2 + 7680 * 512))


def _orthros_1b3(**changes):
    settings: dict[str, Any] = {
        "num_layers": 24,
        "model_dim": 2048,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 128,
    }
    settings |= {"ffn_dim": 5632} | changes
    return ModelConfig(**settings)


def test_operations_of_the_1b3_preset():
    """Six operations a parameter and row; duplicates repeat all but keys, values and one layer."""
    transformer, orthros = _orthros_1b3(kind="transformer"), _orthros_1b3()
    assert sequence_flops(orthros, 2048) / 2048 == pytest.approx(14.4e9, rel=0.005)
    matrices = 24 * (4 * 2048 * 2048 + 3 * 2048 * 5632) + 2048 * 32000
    attention = 24 * 4 * 2048 * 2049 / 2
    assert sequence_flops(transformer, 2048) / 2048 == pytest.approx(3 * (2 * matrices + attention), rel=1e-9)
    repeated = 23 * (2 * 2048 * 2048 + 3 * 2048 * 5632)
    window = 23 * 4 * 2048 * (128 * 129 / 2 + 1920 * 128) / 2048
    expected = 3 * (2 * matrices + attention + 2 * repeated + window)
    assert sequence_flops(orthros, 2048) / 2048 == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["orthros", "transformer", "sliding_window"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 40])
def test_a_sequence_is_its_rows_and_pairs(kind, length):
    config = small_config(kind=kind, output_window=6)
    layout, _ = streams.pretraining(jnp.zeros((1, length + 1), jnp.int32))
    pairs = (int(x) for x in visible_pairs(config, layout))
    assert sequence_flops(config, length) == 3 * forward_flops(config).total(length, length, *pairs)


@pytest.mark.parametrize("kind", ["orthros", "transformer", "sliding_window"])
@pytest.mark.parametrize("output_window", [None, 6])
def test_visible_pairs_of_packed_rows(kind, output_window):
    config = small_config(kind=kind, output_window=output_window)
    segments = np.array([[1] * 9 + [2] * 7 + [0] * 2, [1] * 18, [1, 2] + [3] * 13 + [0] * 3, [0] * 18])
    out_index = np.array([[0, 8, 9, 15, 17, -1], [3, 4, 17, -1, -1, -1], [0, 1, 2, 14, -1, -1], [-1] * 6])
    context_window = None if kind == "transformer" else config.window
    out_window = output_window if kind == "orthros" else context_window

    def count(row, t, window):
        if t < 0 or row[t] == 0:
            return 0
        return sum(row[j] == row[t] and (window is None or t - window < j) for j in range(t + 1))

    rows = jnp.asarray(segments, jnp.int32)
    positions = streams.document_positions(rows)
    every_row = [range(18)] * 4
    for index, chosen in ((None, every_row), (jnp.asarray(out_index, jnp.int32), out_index)):
        layout = streams.Layout(rows, positions, rows, index)
        context, output = visible_pairs(config, layout)
        assert context == sum(count(row, t, context_window) for row in segments for t in range(18))
        assert output == sum(count(row, t, out_window) for row, ts in zip(segments, chosen, strict=True) for t in ts)


def test_pairs_without_segments_and_in_prefill():
    config = small_config()
    tokens = jnp.zeros((2, 10), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(10), (2, 10))
    assert visible_pairs(config, streams.Layout(tokens, positions, None, None)) == (2 * 34, 2 * 55)
    assert visible_pairs(config, streams.prefill(tokens, jnp.array([10, 3]))) == (34 + 6, 10 + 3)


@pytest.mark.parametrize("kind", ["orthros", "transformer", "sliding_window"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_compiler_counts_the_same_products(kind, num_layers):
    """A single block computes all T x P pairs, and a scan over one layer is unrolled: each counts once.

    Element-wise work, which the form leaves out, is 0.8 %; attention of either stream is 1.8 % at least.
    """
    length, num_outputs = 64, 24
    config = small_config(
        kind=kind, num_layers=num_layers, vocab_size=512, model_dim=256, num_heads=8, num_kv_heads=4,
        head_dim=64, ffn_dim=512,
    )  # fmt: skip
    tokens = jnp.zeros((1, length), jnp.int32)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    layout = streams.Layout(tokens, positions, None, jnp.arange(num_outputs, dtype=jnp.int32)[None])
    graph, shapes = graph_of(config), jax.eval_shape(lambda: random_params(config))

    def forward(params, layout):
        model = nnx.merge(graph, params)
        return model.logits(model(layout))

    counted = fast_jit(forward).lower(shapes, layout).compile().cost_analysis()
    assert counted is not None
    flops = forward_flops(config)
    expected = flops.total(length, num_outputs, length * length, length * num_outputs)
    assert expected <= counted["flops"] <= 1.015 * expected
