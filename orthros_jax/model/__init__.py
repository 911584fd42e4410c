"""The models: `build_model` makes any kind from its settings."""

from flax import nnx

from orthros_jax.config import ModelConfig
from orthros_jax.model.language_model import LanguageModel

__all__ = ["LanguageModel", "build_model"]


def build_model(config: ModelConfig, rngs: nnx.Rngs) -> LanguageModel:
    """A freshly initialised model."""
    return LanguageModel(config, rngs)
