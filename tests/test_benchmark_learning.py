"""The comparison of kinds of model: its losses by position, its table, and the text that it learns from."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import debian_text, learning
from orthros_jax import streams
from orthros_jax.config import Config, DataConfig, ModelConfig, TrainingConfig
from orthros_jax.data.loader import evaluation_batches
from orthros_jax.data.prepare import prepare
from orthros_jax.model import build_model
from orthros_jax.training.step import make_program

MODEL = ModelConfig(
    vocab_size=258,
    num_layers=2,
    model_dim=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=16,
    window=4,
    init_std=0.5,
    compute_dtype="float32",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": f"{number} " * (number % 17 + 1)}) for number in range(100)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare([str(folder / "text.jsonl")], folder / "data", holdout=0.5, workers=1, progress=False)
    return DataConfig(paths=[str(folder / "data")], sequence_length=24)


def test_losses_by_position_are_parts_of_the_held_out_loss(data):
    params = nnx.to_pure_dict(nnx.state(build_model(MODEL, nnx.Rngs(0)), nnx.Param))
    entropy, count = learning.losses_by_position(MODEL, params, data)
    config = Config(model=MODEL, data=data, training=TrainingConfig(batch_size=8))
    step = jax.jit(make_program(config, 1).eval_step)
    batches = list(evaluation_batches(data, batch_size=8))
    sums = [step(params, batch) for batch in batches]
    # Both add up some hundred losses in float32.
    assert entropy.sum() == pytest.approx(sum(float(s.cross_entropy) for s in sums), rel=1e-5)
    assert count.sum() == sum(float(s.weight) for s in sums)
    expected = np.zeros(data.sequence_length)
    for batch in batches:
        layout, targets = streams.pretraining(jnp.asarray(batch["tokens"]), jnp.asarray(batch["segment_ids"]))
        ids = np.asarray(layout.segment_ids)
        for row, weights in zip(ids, np.asarray(targets.weights), strict=True):
            for i, weight in enumerate(weights):
                # The row's place in its document is the number of rows of the document before it.
                expected[(row[:i] == row[i]).sum() if weight else 0] += weight
    assert count.tolist() == expected.tolist()


def test_rows_of_another_call_are_added():
    def row(kind, seed, loss):
        return {"size": "42m", "kind": kind, "seed": seed, "heldout_loss": loss}

    before = [row("transformer", 0, 3.0), row("orthros", 1, 2.0)]
    rows = learning.merged(before, [row("transformer", 0, 2.5), row("orthros", 0, 1.5)])
    assert rows == [row("orthros", 0, 1.5), row("orthros", 1, 2.0), row("transformer", 0, 2.5)]


def test_commands_are_those_of_a_run(tmp_path):
    from orthros_jax.config_reader import read_config

    seen = set()
    for kind in learning.KINDS:
        for size in ("42m", "110m"):
            _, _, *arguments = learning.command(tmp_path, "data", size, kind, 3, ["--training.steps", "7"])
            config = read_config(arguments)
            assert (config.training.seed, config.training.steps, config.run_dir) == (3, 7, str(tmp_path))
            seen.add((config.model.kind, config.model.query_sharing, config.model.window, config.model.model_dim))
    assert len(seen) == 8


def test_text_of_pages(tmp_path):
    page = "<html><head><title>no</title></head><body><nav>no</nav><h1>Title</h1><p>Some words.</p></body></html>"
    words = " word" * 100
    (tmp_path / "a.html").write_text(page.replace("words.", f"words.{words}"))
    (tmp_path / "a.txt").write_text(f"twin of the page{words}")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG" * 100)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(f"\n\n\n\nlines  \n\n\n\nof\r\ntext{words}".encode()))
    (tmp_path / "_sources").mkdir()
    (tmp_path / "_sources" / "c.txt").write_text(f"source{words}")
    found = {path.name: list(debian_text.documents(path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name, texts in found.items() if texts} == {"a.html", "b.txt.gz"}
    assert found["a.html"] == [f"Title\n\nSome words.{words}"]
    assert found["b.txt.gz"] == [f"lines\n\nof\ntext{words}"]


def test_a_dictionary_is_cut_at_empty_lines(tmp_path):
    entries = [f"entry {number}" + " word" * 200 for number in range(100)]
    (tmp_path / "words.dict").write_text("\n\n".join(entries))
    pieces = list(debian_text.documents(tmp_path / "words.dict"))
    assert len(pieces) > 3
    assert "\n\n".join(pieces).split("\n\n") == entries
    assert all(len(piece) <= 2 * debian_text._PIECE for piece in pieces)
