"""config.json of Hugging Face to `ModelConfig` and back.

Reading is strict: an entry that changes what the model computes and that this project does not implement is an error,
and so is an entry that nobody here knows. A model that loads gives the numbers of its original.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from orthros_jax.config import ConfigError, ModelConfig
from orthros_jax.errors import UserError

CONFIG_FILE = "config.json"
ORTHROS = "orthros"
AUTO_MAP = {
    "AutoConfig": "configuration_orthros.OrthrosConfig",
    "AutoModelForCausalLM": "modeling_orthros.OrthrosForCausalLM",
}
ImportKind = Literal["orthros", "transformer"]

# config.json -> ModelConfig, for every model that is read or written.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "model_dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_sequence_length",
}
_OTHER = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings", "initializer_range": "init_std"}
# What only Orthros has.
_ORTHROS = {
    "orthros_window": "window",
    "orthros_output_window": "output_window",
    "query_sharing": "query_sharing",
    "scale_offset_position": "scale_offset_position",
    "qk_norm": "qk_norm",
}
_LLAMA3 = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_frequency_factor",
    "high_freq_factor": "rope_high_frequency_factor",
    "original_max_position_embeddings": "rope_original_length",
}
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
# Entries that must have one of these values where they stand, for no other is implemented.
_FIXED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
}
# Entries without a bearing on the numbers: ids of tokens (the tokenizer and generation_config.json tell them), types of
# storage, names and versions, and switches that only another implementation has.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "is_llama_config",
    "max_window_layers", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers.js_config",
    "transformers_version", "use_cache",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` says by itself.

    Attributes:
      architecture: class in transformers.
      qk_norm: whether queries and keys are normalised.
      head_dim: size of a head where config.json does not give one, None for hidden_size / num_attention_heads.
    """

    architecture: str
    qk_norm: bool
    head_dim: int | None


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", qk_norm=False, head_dim=None),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}


def read_hf_config(folder: Path | str) -> dict[str, Any]:
    """Reads config.json of a model folder.

    Raises:
      UserError: no folder, no config.json in it, or something that is no JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a folder with config.json and safetensors files")
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {CONFIG_FILE} here; name a folder in the format of Hugging Face")
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}; download it again") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return document


def to_model_config(document: dict[str, Any], source: str, kind: ImportKind | None = None, **numerics) -> ModelConfig:
    """The settings of a model described by config.json.

    Args:
      document: the content of config.json.
      source: its path, for messages.
      kind: what to make of a Llama or Qwen3: `orthros` (None means that too) or the original `transformer`.
      numerics: settings that config.json does not know, for example `param_dtype`.

    Raises:
      UserError: an entry is unknown, contradicts another or asks for something that is not implemented.
    """
    model_type = document.get("model_type")
    if model_type != ORTHROS and model_type not in _FAMILIES:
        known = ", ".join([*_FAMILIES, ORTHROS])
        raise _wrong(source, "model_type", f"{json.dumps(model_type)} is not supported; the supported are {known}")
    _check_architecture(document, source)
    _check_fixed(document, source)
    is_orthros = model_type == ORTHROS
    own = set(_ORTHROS) if is_orthros else {"layer_types"}
    known = {*_SIZES, *_OTHER, *_ROPE, *_FIXED, *_WITHOUT_EFFECT, *own}
    if unknown := sorted(set(document) - known):
        raise _wrong(
            source, unknown[0], "unknown entry, so what it does to the model is unknown too; remove it if nothing"
        )
    settings: dict[str, Any] = {"tie_embeddings": False, **_sizes(document, source)}
    for key, name in _OTHER.items():
        if key in document:
            settings[name] = _typed(document, key, bool if key == "tie_word_embeddings" else float, source)
    if "norm_eps" not in settings:
        raise _wrong(source, "rms_norm_eps", "missing")
    settings |= _rope(document, source)
    if is_orthros:
        if kind == "transformer":
            raise UserError(f"{source}: this is an Orthros model already; leave out --kind transformer")
        if missing := [key for key in _ORTHROS if key not in document]:
            raise _wrong(source, missing[0], "missing")
        settings |= {"kind": "orthros"} | {name: document[key] for key, name in _ORTHROS.items()}
    else:
        _check_full_attention(document, source)
        settings |= {"kind": kind or "orthros", "qk_norm": _FAMILIES[model_type].qk_norm}
    try:
        return ModelConfig(**settings, **numerics)
    except (ConfigError, TypeError) as error:
        raise UserError(f"{source}: {error}") from None


def from_model_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json, without the ids of special tokens.

    Orthros names its windows `orthros_window`: under the name `sliding_window` transformers would let every layer's
    cache forget older keys, which the output rows read.

    Args:
      config: the model.
      dtype: type of the stored parameters.
    """
    document: dict[str, Any] = {"model_type": _model_type(config), "architectures": [architecture(config)]}
    if config.kind == "orthros":
        document["auto_map"] = AUTO_MAP
        document |= {key: getattr(config, name) for key, name in _ORTHROS.items()}
    elif config.kind == "sliding_window":
        document["sliding_window"] = config.window
        if config.qk_norm:
            document |= {"use_sliding_window": True, "max_window_layers": 0}
    if _model_type(config) in ("llama", "qwen3"):
        document["attention_bias"] = False
    document |= {key: getattr(config, name) for key, name in {**_SIZES, **_OTHER}.items()}
    document |= {"hidden_act": "silu", "attention_dropout": 0.0}
    scaling: dict[str, Any] | None = None
    if config.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3"} | {key: getattr(config, name) for key, name in _LLAMA3.items()}
    if config.kind == "orthros":
        document["rope_parameters"] = (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_base}
    else:
        # Every version of transformers reads these two.
        document |= {"rope_theta": config.rope_base, "rope_scaling": scaling}
    return document | {"use_cache": True, "torch_dtype": dtype}


def architecture(config: ModelConfig) -> str:
    """The class in transformers, or of the exported modeling file, that computes this model."""
    if config.kind == "orthros":
        return "OrthrosForCausalLM"
    if config.kind == "sliding_window":
        return "Qwen3ForCausalLM" if config.qk_norm else "MistralForCausalLM"
    return _FAMILIES[_model_type(config)].architecture


def _model_type(config: ModelConfig) -> str:
    if config.kind == "orthros":
        return ORTHROS
    if config.qk_norm:
        return "qwen3"
    return "mistral" if config.kind == "sliding_window" else "llama"


def _wrong(source: str, key: str, problem: str) -> UserError:
    return UserError(f"{source}: {key}: {problem}")


def _check_architecture(document: dict, source: str) -> None:
    model_type = document["model_type"]
    expected = "OrthrosForCausalLM" if model_type == ORTHROS else _FAMILIES[model_type].architecture
    if document.get("architectures", [expected]) != [expected]:
        found = json.dumps(document["architectures"])
        raise _wrong(source, "architectures", f"{found} is not supported; for {model_type} it must be {expected}")


def _check_fixed(document: dict, source: str) -> None:
    fixed = dict(_FIXED)
    # A Qwen3 states the window that its layers would use if use_sliding_window were true.
    if document["model_type"] == "qwen3" and document.get("use_sliding_window", False) is False:
        del fixed["sliding_window"]
    for key, allowed in fixed.items():
        if key in document and document[key] not in allowed:
            wanted = json.dumps(allowed[0])
            raise _wrong(source, key, f"{json.dumps(document[key])} is not supported, only {wanted}")


def _check_full_attention(document: dict, source: str) -> None:
    types = document.get("layer_types")
    if types is not None and set(types) - {"full_attention"}:
        raise _wrong(source, "layer_types", "only full_attention is supported")
    if types is not None and len(types) != document["num_hidden_layers"]:
        raise _wrong(source, "layer_types", f"{len(types)} entries for {document['num_hidden_layers']} layers")


def _sizes(document: dict, source: str) -> dict[str, int]:
    """All of `_SIZES`; heads and their size have defaults in transformers."""
    given = {key: document[key] for key in _SIZES if document.get(key) is not None}
    required = set(_SIZES) - {"num_key_value_heads", "head_dim"}
    if missing := [key for key in _SIZES if key in required - set(given)]:
        raise _wrong(source, missing[0], "missing")
    sizes = {key: _typed(given, key, int, source) for key in given}
    family = _FAMILIES.get(document["model_type"])
    heads = sizes["num_attention_heads"]
    if "num_key_value_heads" not in sizes:
        if document["model_type"] != "llama":
            raise _wrong(source, "num_key_value_heads", "missing")
        sizes["num_key_value_heads"] = heads
    if "head_dim" not in sizes:
        if heads <= 0 or sizes["hidden_size"] % heads:
            raise _wrong(source, "hidden_size", f"{sizes['hidden_size']} is not a multiple of {heads} heads")
        sizes["head_dim"] = (family and family.head_dim) or sizes["hidden_size"] // heads
    return {_SIZES[key]: value for key, value in sizes.items()}


def _rope(document: dict, source: str) -> dict[str, Any]:
    """Rotary settings, which stand in `rope_parameters` since transformers 5, in two entries before."""
    scaling = document.get("rope_scaling")
    parameters = document.get("rope_parameters")
    for key, block in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if block is not None and not isinstance(block, dict):
            raise _wrong(source, key, f"must be an object or null, got {json.dumps(block)}")
    base: Any = document.get("rope_theta")
    block = {key: value for key, value in (scaling or {}).items() if key != "rope_theta"}
    name = "rope_scaling"
    if parameters is not None:
        new = {key: value for key, value in parameters.items() if key != "rope_theta"}
        stated = parameters.get("rope_theta", base)
        if base not in (None, stated) or (scaling is not None and _without_type(block) != _without_type(new)):
            raise _wrong(source, "rope_parameters", "contradicts rope_theta or rope_scaling; remove the wrong ones")
        base, block, name = stated, new, "rope_parameters"
    if base is None:
        base = 10000.0
    settings: dict[str, Any] = {"rope_base": _typed({"rope_theta": base}, "rope_theta", float, source)}
    types = {block[key] for key in ("rope_type", "type") if key in block} or {"default"}
    if len(types) > 1:
        raise _wrong(source, f"{name}.rope_type", f"contradicts {name}.type")
    (rope_type,) = types
    if rope_type not in ("default", "llama3"):
        raise _wrong(
            source, f"{name}.rope_type", f"{json.dumps(rope_type)} is not supported; the supported are default, llama3"
        )
    entries = _without_type(block)
    wanted = _LLAMA3 if rope_type == "llama3" else {}
    if unknown := sorted(set(entries) - set(wanted) - {"partial_rotary_factor"}):
        raise _wrong(source, f"{name}.{unknown[0]}", f"unknown entry of rope type {rope_type}")
    if entries.pop("partial_rotary_factor", 1.0) != 1.0:
        raise _wrong(source, f"{name}.partial_rotary_factor", "only 1.0 is supported")
    if missing := [key for key in wanted if key not in entries]:
        raise _wrong(source, f"{name}.{missing[0]}", "missing, rope type llama3 needs it")
    if rope_type == "llama3":
        settings["rope_scaling"] = "llama3"
        for key, setting in _LLAMA3.items():
            kind = int if key == "original_max_position_embeddings" else float
            settings[setting] = _typed(entries, key, kind, source)
    return settings


def _without_type(block: dict) -> dict:
    return {key: value for key, value in block.items() if key not in ("rope_type", "type")}


def _typed(entries: dict, key: str, kind: type, source: str) -> Any:
    value = entries[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is float and is_number:
        return float(value)
    if kind is int and is_number and value == int(value):
        return int(value)
    names = {bool: "true or false", float: "a number", int: "a whole number"}
    raise _wrong(source, key, f"must be {names[kind]}, got {json.dumps(value)}")
