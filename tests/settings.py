"""Every setting with a valid value that differs from a small base, for tests that sweep over all of them."""

from dataclasses import is_dataclass
from typing import Any, get_type_hints

from orthros_jax.config import Config

# A configuration in which each change below is valid on its own. Settings that only matter together with
# others (llama3 frequencies, the length of a final decay) have what they need here.
BASE = {
    "run_dir": "runs/base",
    "model.vocab_size": 258,
    "model.num_layers": 2,
    "model.model_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.ffn_dim": 64,
    "model.window": 8,
    "model.qk_norm": True,
    "model.rope_scaling": "llama3",
    "model.rope_original_length": 64,
    "model.max_sequence_length": 64,
    "data.paths": ["data/base"],
    "data.sequence_length": 32,
    "optimizer.schedule": "wsd",
    "optimizer.schedule_steps": 8,
    "optimizer.warmup_steps": 1,
    "optimizer.decay_steps": 2,
    "training.steps": 4,
    "training.batch_size": 8,
    "checkpoint.every": 2,
    "evaluation.every": 2,
    "evaluation.sample_prompt": "a",
    "evaluation.sample_tokens": 4,
}

PERTURBED = {
    "run_dir": "runs/other",
    "model.kind": "transformer",
    "model.vocab_size": 264,
    "model.num_layers": 3,
    "model.model_dim": 48,
    "model.num_heads": 2,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.ffn_dim": 48,
    "model.window": 5,
    "model.output_window": 9,
    "model.query_sharing": "separate",
    "model.scale_offset_position": "before_norm",
    "model.qk_norm": False,
    "model.tie_embeddings": True,
    "model.norm_eps": 1e-5,
    "model.rope_base": 500000.0,
    "model.rope_scaling": "none",
    "model.rope_factor": 32.0,
    "model.rope_low_frequency_factor": 2.0,
    "model.rope_high_frequency_factor": 3.0,
    "model.rope_original_length": 32,
    "model.max_sequence_length": 16,  # shorter than the data: an error
    "model.init_std": 0.01,
    "model.param_dtype": "bfloat16",
    "model.compute_dtype": "float32",
    "model.statistics_dtype": "bfloat16",
    "model.attention_impl": "xla",
    "model.remat": "full",
    "model.float8": True,
    "model.unroll": 2,
    "data.paths": ["data/other"],
    "data.weights": [2.0],
    "data.sequence_length": 16,
    "data.source": "python-stdlib",
    "data.tokenizer": "train:300",
    "data.shuffle": False,
    "data.prefetch": 2,
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "linear",
    "optimizer.schedule_steps": 6,
    "optimizer.warmup_steps": 2,
    "optimizer.decay_steps": 3,
    "optimizer.final_ratio": 0.5,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip_norm": 0.5,
    "optimizer.ema_decay": 0.9,
    "training.steps": 6,
    "training.batch_size": 16,
    "training.accumulation": 2,
    "training.output_fraction": 0.5,
    "training.seed": 1,
    "training.z_loss": 1e-4,
    "training.max_skipped_steps": 2,
    "training.watchdog_seconds": 30.0,
    "training.compile_cache": "runs/compiled",
    "training.profile_steps": [2, 3],
    "mesh.data": 4,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "mesh.context": 2,
    "checkpoint.every": 3,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 2,
    "evaluation.every": 3,
    "evaluation.sample_prompt": "b",
    "evaluation.sample_tokens": 5,
    "metrics.every": 2,
    "metrics.tensorboard": False,
    "metrics.wandb": "offline",
    "metrics.wandb_project": "other",
    "metrics.progress": False,
    "metrics.peak_tflops": 100.0,
}


def leaves(config: Config) -> dict[str, Any]:
    """The configuration as {dotted name: value}."""
    flat = {}
    for name, value in vars(config).items():
        if is_dataclass(value):
            flat |= {f"{name}.{leaf}": leaf_value for leaf, leaf_value in vars(value).items()}
        else:
            flat[name] = value
    return flat


def make_config(settings: dict[str, Any]) -> Config:
    """A Config from {dotted name: value}; settings left out keep their defaults."""
    hints = get_type_hints(Config)
    arguments: dict[str, Any] = {name: value for name, value in settings.items() if "." not in name}
    for section in (name for name, hint in hints.items() if is_dataclass(hint)):
        prefix = f"{section}."
        values = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
        arguments[section] = hints[section](**values)
    return Config(**arguments)
