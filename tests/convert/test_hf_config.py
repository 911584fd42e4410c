"""config.json of published models and of wrong ones."""

import json
import re

import pytest
from model_folders import small_config

from orthros_jax.convert.hf_config import from_model_config, read_hf_config, to_model_config
from orthros_jax.errors import UserError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SIZES}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "head_dim": 32, **SIZES}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(document, kind=None):
    return to_model_config(document, "config.json", kind)


# Entries as they stand in the files of these models, beside the sizes.
PUBLISHED = {
    "Llama 2": (
        LLAMA
        | {"bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float16"}
        | {"_name_or_path": "m", "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True},
        {"rope_base": 10000.0, "rope_scaling": "none", "head_dim": 16, "tie_embeddings": False},
    ),
    "Llama 3": (
        LLAMA | {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 500000.0, "rope_scaling": None},
        {"rope_base": 500000.0, "norm_eps": 1e-5},
    ),
    "Llama 3.2": (
        LLAMA
        | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING, "head_dim": 64, "mlp_bias": False}
        | {"tie_word_embeddings": True, "eos_token_id": [128001, 128008]},
        {"rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_length": 8192, "head_dim": 64},
    ),
    "SmolLM2": (
        LLAMA
        | {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True}
        | {"transformers.js_config": {"dtype": "q4"}, "pad_token_id": 2},
        {"rope_base": 100000.0, "tie_embeddings": True, "qk_norm": False},
    ),
    "Qwen3": (
        QWEN3
        | {"attention_bias": False, "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
        | {"rope_theta": 1000000, "rope_scaling": None},
        {"qk_norm": True, "head_dim": 32, "rope_base": 1e6},
    ),
    "Qwen3, saved by transformers 5": (
        QWEN3
        | {"dtype": "bfloat16", "layer_types": ["full_attention"] * 2, "sliding_window": 4096}
        | {"use_sliding_window": False, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"qk_norm": True, "rope_base": 1e6},
    ),
    "Llama 3.1, saved by transformers 5": (
        LLAMA | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}},
        {"rope_scaling": "llama3", "rope_base": 500000.0, "rope_factor": 32.0},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    document, expected = PUBLISHED[name]
    config = read(document)
    assert {key: getattr(config, key) for key in expected} == expected
    assert (config.kind, config.model_dim, config.num_kv_heads, config.max_sequence_length) == ("orthros", 64, 2, 4096)
    assert read(document, "transformer").kind == "transformer"


def test_heads_and_their_size_have_the_defaults_of_transformers():
    without_heads = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read(without_heads).num_kv_heads == 4
    assert read(LLAMA).head_dim == 16
    without_size = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert read(without_size).head_dim == 128


WRONG = {
    "another model": (
        {"model_type": "gemma2"},
        'config.json: model_type: "gemma2" is not supported; the supported are llama, qwen3, orthros',
    ),
    "another class": (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        'config.json: architectures: ["LlamaForSequenceClassification"] is not supported; for llama it must be '
        "LlamaForCausalLM",
    ),
    "unknown entry": (
        {**LLAMA, "logit_scale": 0.5},
        "config.json: logit_scale: unknown entry, so what it does to the model is unknown too; remove it if nothing",
    ),
    "bias": (
        {**LLAMA, "attention_bias": True},
        "config.json: attention_bias: true is not supported, only false",
    ),
    "activation": (
        {**LLAMA, "hidden_act": "gelu"},
        'config.json: hidden_act: "gelu" is not supported, only "silu"',
    ),
    "quantized": (
        {**LLAMA, "quantization_config": {"bits": 4}},
        'config.json: quantization_config: {"bits": 4} is not supported, only null',
    ),
    "window of a Llama": (
        {**LLAMA, "sliding_window": 1024},
        "config.json: sliding_window: 1024 is not supported, only null",
    ),
    "window of a Qwen3": (
        {**QWEN3, "use_sliding_window": True, "sliding_window": 1024},
        "config.json: use_sliding_window: true is not supported, only false",
    ),
    "window by layer": (
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
        "config.json: layer_types: only full_attention is supported",
    ),
    "layers": (
        {**QWEN3, "layer_types": ["full_attention"]},
        "config.json: layer_types: 1 entries for 2 layers",
    ),
    "rope type": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        'config.json: rope_scaling.rope_type: "yarn" is not supported; the supported are default, llama3',
    ),
    "old rope type": (
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
        'config.json: rope_scaling.rope_type: "linear" is not supported; the supported are default, llama3',
    ),
    "incomplete rope": (
        {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "config.json: rope_scaling.low_freq_factor: missing, rope type llama3 needs it",
    ),
    "unknown rope entry": (
        {**LLAMA, "rope_scaling": LLAMA3_SCALING | {"attention_factor": 2.0}},
        "config.json: rope_scaling.attention_factor: unknown entry of rope type llama3",
    ),
    "two rotations": (
        {**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "config.json: rope_parameters: contradicts rope_theta or rope_scaling; remove the wrong ones",
    ),
    "missing size": (
        {key: value for key, value in LLAMA.items() if key != "intermediate_size"},
        "config.json: intermediate_size: missing",
    ),
    "type": (
        {**LLAMA, "tie_word_embeddings": "yes"},
        'config.json: tie_word_embeddings: must be true or false, got "yes"',
    ),
    "text for a number": (
        {**LLAMA, "hidden_size": "64"},
        'config.json: hidden_size: must be a whole number, got "64"',
    ),
    "heads": (
        {**LLAMA, "num_key_value_heads": 3},
        "config.json: model.num_kv_heads: 3 does not divide model.num_heads 4; set both together",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_entries(name):
    document, message = WRONG[name]
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        read(document)


def test_wrong_files(tmp_path):
    with pytest.raises(UserError, match=r"no such folder; name a folder with config.json and safetensors files$"):
        read_hf_config(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no config\.json here; name a folder in the format of Hugging Face$"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"config\.json: damaged: .*; download it again$"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: not a JSON object; download it again$"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_sharing": "separate", "output_window": 9, "tie_embeddings": True},
        {"qk_norm": True, "scale_offset_position": "before_norm", "rope_scaling": "llama3", "rope_factor": 4.0},
    ],
)
def test_an_orthros_configuration_comes_back(changes):
    config = small_config(compute_dtype="bfloat16", norm_eps=1e-5, rope_base=5e5, **changes)
    document = json.loads(json.dumps(from_model_config(config, "float32")))
    assert to_model_config(document, "config.json") == config
    assert "sliding_window" not in document


def test_an_orthros_stays_one():
    document = from_model_config(small_config(), "float32")
    message = "config.json: this is an Orthros model already; leave out --kind transformer"
    with pytest.raises(UserError, match=f"^{message}$"):
        read(document, "transformer")
    del document["orthros_window"]
    with pytest.raises(UserError, match=r"^config\.json: orthros_window: missing$"):
        read(document)
