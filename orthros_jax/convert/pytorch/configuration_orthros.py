"""Settings of an Orthros model for transformers. Written by the export of Orthros-JAX."""

from transformers import PretrainedConfig


class OrthrosConfig(PretrainedConfig):
    """Shape of the model, as in config.json.

    Args:
      orthros_window: keys that a context row sees, its own included. It is not called `sliding_window`, under which
        name caches forget older keys: the output rows read them all.
      orthros_output_window: the same for output rows; None for all.
      query_sharing: `scale_offset`, `shared` or `separate`: how the streams share the query projection.
      scale_offset_position: `after_norm` or `before_norm`, where queries are normalised.
      rope_parameters: `rope_type` (default or llama3), `rope_theta`, and what llama3 needs, as in Llama 3.1.
      qk_norm: RMS normalisation of queries and keys per head.
    """

    model_type = "orthros"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        orthros_window=128,
        orthros_output_window=None,
        query_sharing="scale_offset",
        scale_offset_position="after_norm",
        qk_norm=False,
        rms_norm_eps=1e-6,
        rope_parameters=None,
        max_position_embeddings=8192,
        hidden_act="silu",
        attention_dropout=0.0,
        initializer_range=0.02,
        use_cache=True,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.orthros_window = orthros_window
        self.orthros_output_window = orthros_output_window
        self.query_sharing = query_sharing
        self.scale_offset_position = scale_offset_position
        self.qk_norm = qk_norm
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.max_position_embeddings = max_position_embeddings
        self.hidden_act = hidden_act
        self.attention_dropout = attention_dropout
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
