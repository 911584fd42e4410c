"""The inference benchmark: its counts by brute force, and a run on the processor."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import inference
from orthros_jax.model import build_model
from orthros_jax.model.attention import KINDS

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.mark.parametrize("kind", inference.KIND_NAMES)
@pytest.mark.parametrize("length", [5, 40])
def test_operations_of_a_prefill(kind, length):
    config: Any = dataclasses.replace(inference.SHAPES["tiny"], kind=kind)
    d, n, k, h, f = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_dim
    projections = {"q": d * n * h, "kv": 2 * d * k * h, "o": n * h * d, "ffn": 3 * d * f}
    hidden = config.num_layers - 1
    # Rows of each product of all layers; the last layer makes keys and values of every row, the rest of one alone.
    output_layers = config.num_layers if kind == "orthros" else 1
    rows = dict.fromkeys(projections, length * hidden + output_layers) | {"kv": length * config.num_layers}
    products = sum(rows[name] * projections[name] for name in projections) + d * config.vocab_size
    window = KINDS[kind](config).context_window or length
    pairs = hidden * sum(min(i + 1, window) for i in range(length)) + output_layers * length
    assert inference.prefill_operations(config, 3, length) == 3 * (2 * products + 4 * n * h * pairs)


def test_bytes_of_the_weights():
    config = inference.SHAPES["tiny"]
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))), nnx.Param))
    del params["embedding"]
    assert inference.weight_bytes(config) == sum(2 * np.prod(x.shape) for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    options = ["--shape", "tiny", "--lengths", "64,200", "--chunk", "128", "--new-tokens", "3", "--repeats", "2"]
    inference.main([*options, "--longest-full", "100", "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    found = [(row["kind"], row["tokens"], row.get("is_estimate", False)) for row in result["rows"]]
    assert found == [
        ("orthros", 64, False),
        ("transformer", 64, False),
        ("orthros", 200, False),
        ("transformer", 200, True),
    ]
    assert set(result["comparisons"]) == {"64", "200"}
    ours, full = result["rows"][:2]
    compared = result["comparisons"]["64"]
    assert compared["ratio"] == full["first_token_seconds"] / ours["first_token_seconds"]
    assert compared["of_operations"] == full["operations"] / ours["operations"]
    for row in result["rows"]:
        assert row["first_token_seconds"] > 0

    assert "64 tokens: ratio" in capsys.readouterr().out


@pytest.mark.slow
def test_one_after_the_other(tmp_path):
    """Where there is memory for one cache of 64 tokens but not two, both kinds are measured; more go by layers."""
    config = inference.SHAPES["tiny"]
    memory = inference.weight_bytes(config) + 1.5 * inference.cache_bytes(config, 66, 2)
    options = ["--shape", "tiny", "--chunk", "128", "--new-tokens", "2", "--repeats", "1", "--memory", str(memory)]
    inference.main([*options, "--lengths", "64,200", "--longest-full", "200", "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    found = [(row["kind"], row["tokens"], row.get("is_estimate", False)) for row in rows]
    expected = [("orthros", 64, False), ("transformer", 64, False), ("orthros", 200, False), ("transformer", 200, True)]
    assert found == expected
    assert [row.get("cache_bytes_per_number") for row in rows] == [2, 2, 1, None]


@pytest.mark.slow
def test_a_run_on_two_devices(tmp_path):
    options = ["--shape", "tiny", "--lengths", "300", "--chunk", "128", "--new-tokens", "2", "--repeats", "1"]
    inference.main([*options, "--devices", "2", "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("inference_x2_")
    ours, full = json.loads(path.read_text())["rows"]
    for row in (ours, full):
        assert row["tflops_per_device"] == pytest.approx(row["operations"] / row["first_token_seconds"] / 2e12)
    # Orthros has its weights on both devices, the Transformer a half on each.
    config = inference.SHAPES["tiny"]
    cache = inference.cache_bytes(config, 301, 2)
    floors = [row["decode_floor"] * row["decode_step_ms"] / 1e3 * 2 * 4.3e12 for row in (ours, full)]
    weights = [inference.weight_bytes(dataclasses.replace(config, kind=kind)) for kind in inference.KIND_NAMES]
    assert floors == pytest.approx([2 * weights[0] + cache, weights[1] + cache])
