"""Against PyTorch: published architectures as transformers computes them, and the exported model files."""

import dataclasses
import json
import os
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_folders import (
    LLAMA3,
    ROWS,
    VOCABULARY,
    assert_same_bits,
    logits,
    random_params,
    random_tokens,
    small_config,
    write_model,
    write_tokenizer,
)

from orthros_jax import streams
from orthros_jax.config import ModelConfig
from orthros_jax.convert import tensors
from orthros_jax.convert.load import load_hf
from orthros_jax.loss import cross_entropy
from orthros_jax.model import build_model
from orthros_jax.streams import Layout

# Read when transformers is imported: it copies modeling files into this folder, and never asks the network.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()
os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="needs requirements-torch.txt")

# Warnings of these two libraries about each other are not ours to repair.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("compile_cache")]
TOLERANCE = 1e-4
EXPORTED = {
    "scale-offset": {},
    "separate queries": {"query_sharing": "separate", "qk_norm": True, "tie_embeddings": True},
    "before norm": {"qk_norm": True, "scale_offset_position": "before_norm", "output_window": 9, **LLAMA3},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder, impl="sdpa", **options):
    model, information = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, attn_implementation=impl, output_loading_info=True, **options
    )
    assert not any(information.values()), information
    return model.eval()


def torch_logits(model, tokens, **arguments):
    with torch.no_grad():
        return model(torch.tensor(tokens).long(), **arguments).logits.float().numpy()


# Import


def original(folder, config_class, model_class, **changes):
    """A random model of transformers, saved as it saves models; scales of norms are far from 1."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "initializer_range": 0.15,
    }
    model = model_class(config_class(**(settings | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def llama(folder):
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    # Frequencies are rounded to float32, so angles at position 12,000 are 7e-4 off in one of the two; small scores keep
    # that from showing, as they do not keep a wrong scaling.
    rope = {"rope_parameters": scaling, "max_position_embeddings": 131072, "initializer_range": 0.1}
    return original(folder, transformers.LlamaConfig, transformers.LlamaForCausalLM, **rope)


def qwen3(folder, tied):
    changes = {"head_dim": 32, "tie_word_embeddings": tied}
    return original(folder, transformers.Qwen3Config, transformers.Qwen3ForCausalLM, **changes)


@pytest.mark.parametrize(
    "make",
    [llama, lambda folder: qwen3(folder, tied=False), lambda folder: qwen3(folder, tied=True)],
    ids=["llama", "qwen3", "qwen3 tied"],
)
def test_imports_compute_what_transformers_computes(make, tmp_path):
    model = make(tmp_path)
    tokens = random_tokens()
    # Distances beyond the original length of the llama3 scaling, where a missing one shows.
    positions = np.sort(np.random.default_rng(1).integers(0, 12_000, (2, ROWS)).astype(np.int32))
    expected = torch_logits(model, tokens, position_ids=torch.tensor(positions).long())
    layout = Layout(jnp.asarray(tokens), jnp.asarray(positions), None, None)
    kind: Any
    for kind, window in (("transformer", 1), ("orthros", ROWS)):
        config, params, _ = load_hf(tmp_path, kind)
        config = ModelConfig(**(vars(config) | {"compute_dtype": "float32", "window": window}))
        np.testing.assert_allclose(logits(config, params, layout), expected, atol=TOLERANCE)
    assert np.abs(expected).max() > 1


# Export


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One float32 export of each kind of Orthros: folder, settings and parameters."""
    made = {}
    for name, changes in EXPORTED.items():
        config = small_config(**changes)
        params = random_params(config)
        made[name] = write_model(tmp_path_factory.mktemp("hf") / "model", config, params), config, params
    return made


def pretraining_logits(config, params, tokens):
    return logits(config, params, streams.pretraining(jnp.pad(tokens, ((0, 0), (0, 1))))[0])


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("name", EXPORTED)
def test_all_phases(exported, name, impl):
    folder, config, params = exported[name]
    tokens = random_tokens()
    model = load(folder, impl)
    expected = pretraining_logits(config, params, tokens)
    np.testing.assert_allclose(torch_logits(model, tokens), expected, atol=TOLERANCE)

    # Fine-tuning: the rows that predict the last 10 tokens.
    response = np.arange(ROWS) >= ROWS - 10
    rows = jnp.asarray(tokens), jnp.ones_like(tokens), jnp.asarray(np.tile(response, (2, 1)))
    layout, _ = streams.fine_tuning(*rows, num_outputs=10)
    keep = torch.arange(ROWS - 11, ROWS - 1)
    got = torch_logits(model, tokens[:, :-1], logits_to_keep=keep)
    np.testing.assert_allclose(got, logits(config, params, layout), atol=TOLERANCE)

    # Prefill of prompts of different lengths: padded on the left there, on the right here.
    lengths = np.array([ROWS - 7, ROWS])
    right = np.stack([np.pad(row[:n], (0, ROWS - n)) for row, n in zip(tokens, lengths, strict=True)])
    left = np.stack([np.pad(row[:n], (ROWS - n, 0)) for row, n in zip(tokens, lengths, strict=True)])
    mask = torch.tensor(np.arange(ROWS) >= ROWS - lengths[:, None]).long()
    got = torch_logits(model, left, attention_mask=mask, logits_to_keep=1)
    want = logits(config, params, streams.prefill(jnp.asarray(right), jnp.asarray(lengths)))
    np.testing.assert_allclose(got, want, atol=TOLERANCE)

    # Decoding, token by token behind a prompt of 9.
    with torch.no_grad():
        rows = torch.tensor(tokens).long()
        result = model(rows[:, :9], use_cache=True, logits_to_keep=1)
        steps = [result.logits]
        for row in range(9, ROWS):
            result = model(rows[:, row : row + 1], past_key_values=result.past_key_values, logits_to_keep=1)
            steps.append(result.logits)
    np.testing.assert_allclose(torch.cat(steps, 1).numpy(), expected[:, 8:], atol=TOLERANCE)


def test_blocks_of_rows_change_nothing(exported):
    folder, _, _ = exported["scale-offset"]
    tokens = random_tokens()
    model = load(folder)
    expected = torch_logits(model, tokens)
    module: Any = sys.modules[type(model).__module__]
    whole, module.BLOCK_ROWS = module.BLOCK_ROWS, 3
    try:
        np.testing.assert_allclose(torch_logits(model, tokens), expected, atol=TOLERANCE)
    finally:
        module.BLOCK_ROWS = whole


def test_prefill_makes_no_square_mask(exported, monkeypatch):
    folder, _, _ = exported["scale-offset"]
    model = load(folder)
    module: Any = sys.modules[type(model).__module__]
    largest = []

    def attention(layer, query, key, value, mask, **kwargs):
        largest.append(0 if mask is None else mask.numel())
        return module.eager_attention(layer, query, key, value, mask, **kwargs)

    monkeypatch.setattr(module.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attention)
    rows = 3 * module.BLOCK_ROWS
    torch_logits(model, random_tokens(1, rows), logits_to_keep=1)
    assert 0 < max(largest) <= module.BLOCK_ROWS * (module.BLOCK_ROWS + 4)


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_generate(exported, impl):
    folder, _, _ = exported["scale-offset"]
    model = load(folder, impl)
    model.generation_config.eos_token_id = None
    prompts = torch.tensor(random_tokens()).long()
    settings = {"max_new_tokens": 8, "do_sample": False}
    greedy = model.generate(prompts, **settings)
    with torch.no_grad():
        assert torch.equal(model(greedy[:, :-1]).logits.argmax(-1)[:, ROWS - 1 :], greedy[:, ROWS:])
    assert torch.equal(model.generate(prompts, use_cache=False, **settings), greedy)
    assert torch.equal(model.generate(prompts, prefill_chunk_size=7, **settings), greedy)
    # Padding on the left, more of it than the window.
    padded = torch.stack([torch.cat((torch.full((9,), 257), prompts[0])), torch.cat((prompts[1], prompts[0, :9]))])
    mask = torch.ones_like(padded)
    mask[0, :9] = 0
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[0, 9:], greedy[0])
    assert model.generate(prompts, num_beams=3, **settings).shape == greedy.shape
    torch.manual_seed(0)
    assert model.generate(prompts, max_new_tokens=8, do_sample=True).shape == greedy.shape


def test_loss_and_gradients(exported):
    folder, config, params = exported["scale-offset"]
    tokens = random_tokens()
    graph, _ = nnx.split(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))))

    def loss(params):
        layout, targets = streams.pretraining(jnp.asarray(tokens))
        model = nnx.merge(graph, params)
        sums = cross_entropy(model(layout), model.head_kernel(), targets)
        return sums.objective / sums.weight

    expected, gradients = jax.jit(jax.value_and_grad(loss))(params)
    model = load(folder).train()
    rows = torch.tensor(tokens).long()
    result = model(rows, labels=rows)
    result.loss.backward()
    np.testing.assert_allclose(result.loss.item(), expected, rtol=1e-5)
    flat = tensors.flattened(gradients)
    parameters = dict(model.named_parameters())
    entries = tensors.entries(config)
    assert {entry.name for entry in entries} == set(parameters)
    for entry in entries:
        gradient = np.asarray(flat[entry.path] if entry.layer is None else flat[entry.path][entry.layer])
        np.testing.assert_allclose(
            parameters[entry.name].grad.numpy(), entry.to_file(gradient), atol=1e-5, err_msg=entry.name
        )
    # Labels may leave rows out, and rows without a loss need no logits.
    labels = rows.clone()
    labels[:, : ROWS - 10] = -100
    keep = torch.arange(ROWS - 11, ROWS - 1)
    partial = model(rows, labels=labels, logits_to_keep=keep).loss.item()
    assert partial == pytest.approx(model(rows, labels=labels).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kind": "transformer", **LLAMA3}, "LlamaForCausalLM"),
        ({"kind": "transformer", "qk_norm": True, "tie_embeddings": True}, "Qwen3ForCausalLM"),
        ({"kind": "sliding_window"}, "MistralForCausalLM"),
        ({"kind": "sliding_window", "qk_norm": True}, "Qwen3ForCausalLM"),
    ],
)
def test_single_stream_models_are_stock_models(changes, name, tmp_path):
    config = small_config(**changes)
    params = random_params(config)
    folder = write_model(tmp_path / "model", config, params)
    model, _ = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is getattr(transformers, name)
    tokens = random_tokens()
    expected = pretraining_logits(config, params, tokens)
    np.testing.assert_allclose(torch_logits(model, tokens), expected, atol=TOLERANCE)
    # With its cache as well: a window that forgets one key too many shows there.
    model.generation_config.eos_token_id = None
    rows = torch.tensor(tokens).long()
    greedy = model.generate(rows, max_new_tokens=6, do_sample=False).numpy()
    again = pretraining_logits(config, params, greedy[:, :-1]).argmax(-1)[:, ROWS - 1 :]
    np.testing.assert_array_equal(again, greedy[:, ROWS:])


def test_what_transformers_saves_comes_back(exported, tmp_path):
    folder, config, params = exported["before norm"]
    load(folder).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    loaded, again, _ = load_hf(tmp_path)
    assert dataclasses.replace(loaded, compute_dtype="float32") == config
    assert_same_bits(params, again)


def test_the_exported_tokenizer_loads(exported):
    folder, _, _ = exported["scale-offset"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer("é\ud83d a".encode("utf-8", "replace").decode())["input_ids"]
    assert ids == [256, *"é? a".encode()]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 257)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é? a"
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is True


def test_bfloat16_export_picks_the_same_tokens(tmp_path):
    """The quickstart's shape: where the two best float32 logits are apart by more than the rounding, all agree."""
    shape = {"num_layers": 2, "model_dim": 256, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "ffn_dim": 256}
    config = small_config(**shape, window=32, qk_norm=True, rope_base=300.0)
    params = random_params(config)
    model = load(write_model(tmp_path / "model", config, params, dtype="bfloat16"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tokens = random_tokens(20, 40)
    # As in training: parameters in float32, products in bfloat16.
    results = {
        dtype: pretraining_logits(dataclasses.replace(config, compute_dtype=dtype), params, tokens)[:, -1]
        for dtype in ("float32", "bfloat16")
    }
    exported = torch_logits(model, tokens, logits_to_keep=1)[:, -1]
    exact = results["float32"]
    error = np.abs(results["bfloat16"] - exact).max()
    assert np.abs(exported - exact).max() < 2 * error
    best = np.sort(exact, axis=-1)
    decided = best[:, -1] - best[:, -2] > error
    assert decided.sum() >= 10
    np.testing.assert_array_equal(exported.argmax(-1)[decided], results["bfloat16"].argmax(-1)[decided])
