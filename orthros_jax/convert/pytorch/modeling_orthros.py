"""Orthros in PyTorch, on the attention interface of transformers 5. Written by the export of Orthros-JAX.

A sequence of T tokens gives T context rows and P output rows. Context rows attend within a sliding window and alone
make keys and values, so that there is one cache a layer. Output rows are duplicates of the rows at which a token is
predicted; they attend to everything before them. P is what transformers calls `logits_to_keep`: all rows in training,
the last one in prefill and decoding.
"""

import math

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_orthros import OrthrosConfig

# transformers 5.24 calls the cache `cache`, earlier versions `past_key_values`.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# Rows that attend at once, where a mask is needed: memory grows with the sequence, not with its square.
BLOCK_ROWS = 512


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class ScaleOffset(nn.Module):
    """scale * q + offset, element-wise over heads and channels: what one stream makes of the shared query."""

    def __init__(self, num_heads, head_dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_heads, head_dim))
        self.offset = nn.Parameter(torch.zeros(num_heads, head_dim))

    def forward(self, q):
        return (q.float() * self.scale.float() + self.offset.float()).to(q.dtype)


class SwiGLU(nn.Module):
    """(silu(x gate) * (x up)) down."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_frequencies(config, device):
    """Angle per position of each pair of channels, [head_dim / 2] float32, formed in float64.

    Long wavelengths turn slower with the rope type llama3; the blend is linear in the reciprocal wavelength.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    rope = config.rope_parameters
    frequencies = rope["rope_theta"] ** -exponents
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / rope["factor"])
    return frequencies.float().to(device)


def apply_rope(x, angles):
    """Rotates channel pairs (i, i + head_dim / 2) of x [batch, heads, rows, head_dim] by angles [batch, rows, pair]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention by two matrix products; the mask is True where a row sees a key."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class OrthrosAttention(nn.Module):
    """Both streams over the keys and values of the context rows; the last layer has output rows alone."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False  # masks are built here
        self.streams = ("context", "output")[layer_idx == config.num_hidden_layers - 1 :]
        width, query_width = config.hidden_size, config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        if config.query_sharing == "separate":
            for stream in self.streams:
                setattr(self, f"q_proj_{stream}", nn.Linear(width, query_width, bias=False))
        else:
            self.q_proj = nn.Linear(width, query_width, bias=False)
        if config.query_sharing == "scale_offset":
            for stream in self.streams:
                setattr(self, f"scale_offset_{stream}", ScaleOffset(self.num_heads, self.head_dim))
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, width, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, context, output, layout, cache):
        k = self.k_proj(context).unflatten(-1, (-1, self.head_dim))
        if self.config.qk_norm:
            k = self.k_norm(k)
        k = apply_rope(k.transpose(1, 2), layout.context_angles)
        v = self.v_proj(context).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attended_context = None
        if "context" in self.streams:
            q = self.query("context", context, layout.context_angles)
            attended_context = self.attend(q, k, v, layout.context_rows, self.config.orthros_window, layout.is_key)
        q = self.query("output", output, layout.output_angles)
        window = self.config.orthros_output_window
        return attended_context, self.attend(q, k, v, layout.output_rows, window, layout.is_key)

    def query(self, stream, rows, angles):
        """Projection, normalisation, scale and offset, rotation; `before_norm` swaps the middle two."""
        project = self.q_proj if self.config.query_sharing != "separate" else getattr(self, f"q_proj_{stream}")
        steps = []
        if self.config.qk_norm:
            steps.append(self.q_norm)
        if self.config.query_sharing == "scale_offset":
            steps.append(getattr(self, f"scale_offset_{stream}"))
        if self.config.scale_offset_position == "before_norm":
            steps.reverse()
        q = project(rows).unflatten(-1, (-1, self.head_dim))
        for step in steps:
            q = step(q)
        return apply_rope(q.transpose(1, 2), angles)

    def attend(self, q, k, v, rows, window, is_key):
        """Row r of `rows` sees the keys r - window + 1 to r that are no padding; in blocks of rows."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        results = []
        for start in range(0, q.shape[2], BLOCK_ROWS):
            block = rows[start : start + BLOCK_ROWS]
            first, last = block[0], block[-1]
            begin = 0 if window is None else max(0, first - window + 1)
            mask = None
            if len(block) > 1 or is_key is not None:
                # No mask where a single row sees all keys.
                row = torch.tensor(block, device=q.device)[:, None]
                key = torch.arange(begin, last + 1, device=q.device)
                mask = (key <= row) if window is None else (key <= row) & (key > row - window)
                mask = mask[None, None]
                if is_key is not None:
                    mask = mask & is_key[:, None, None, begin : last + 1]
            keys, values = k[:, :, begin : last + 1], v[:, :, begin : last + 1]
            part = q[:, :, start : start + BLOCK_ROWS]
            results.append(attention(self, part, keys, values, mask, scaling=self.scaling, is_causal=False)[0])
        return self.o_proj(torch.cat(results, dim=1).flatten(2))


class OrthrosLayer(nn.Module):
    """x += attention(norm(x)); x += SwiGLU(norm(x)) on the rows of both streams."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = OrthrosAttention(config, layer_idx)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, context, output, layout, cache):
        """Returns both streams; None for the context rows of the last layer, which nothing reads."""
        normalised = self.input_layernorm(context), self.input_layernorm(output)
        attended_context, attended_output = self.self_attn(*normalised, layout, cache)
        if attended_context is not None:
            context = self.feed_forward(context + attended_context)
        return context, self.feed_forward(output + attended_output)

    def feed_forward(self, x):
        return x + self.mlp(self.post_attention_layernorm(x))


class Layout:
    """Which rows there are: indices within the cache, rotary angles, and which keys are no padding.

    Attributes:
      context_rows, output_rows: index of each row's own key, ascending.
      context_angles, output_angles: [batch, rows, head_dim / 2].
      is_key: [batch, keys] bool, or None where nothing is padding.
    """

    def __init__(self, config, position_ids, attention_mask, past, keep):
        rows = position_ids.shape[1]
        self.context_rows = range(past, past + rows)
        self.output_rows = [past + index for index in keep]
        angles = position_ids[..., None].float() * rope_frequencies(config, position_ids.device)
        self.context_angles, self.output_angles = angles, angles[:, keep]
        self.is_key = None
        if attention_mask is not None and not bool(attention_mask.all()):
            self.is_key = attention_mask[:, : past + rows].bool()


class OrthrosPreTrainedModel(PreTrainedModel):
    config_class = OrthrosConfig
    base_model_prefix = "model"
    _no_split_modules = ["OrthrosLayer"]
    _skip_keys_device_placement = [CACHE]
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ScaleOffset):
            init.ones_(module.scale)
            init.zeros_(module.offset)


class OrthrosModel(OrthrosPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OrthrosLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, embeddings, layout, keep, cache):
        """Normalised output rows, [batch, output rows, hidden_size], of embedded tokens."""
        context, output = embeddings, embeddings[:, keep]
        for layer in self.layers:
            context, output = layer(context, output, layout, cache)
        return self.norm(output)


class OrthrosForCausalLM(OrthrosPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = OrthrosModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Scores of the next token for the last `logits_to_keep` rows, for the rows that it lists, or for all for 0.

        Args:
          input_ids: [batch, rows]; or inputs_embeds, [batch, rows, hidden_size].
          attention_mask: [batch, keys], 0 for padding.
          cache, past_key_values: keys and values of earlier tokens, under either name.
          position_ids: [batch, rows]; by default they count the keys that are no padding.
          labels: [batch, rows], the tokens themselves, -100 where nothing is to be learnt: row t predicts label t + 1.
        """
        embeddings = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, rows, _ = embeddings.shape
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache) and labels is None:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            if attention_mask is None:
                position_ids = torch.arange(past, past + rows, device=embeddings.device).expand(batch, rows)
            else:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + rows]
        if isinstance(logits_to_keep, int):
            keep = list(range(max(0, rows - logits_to_keep) if logits_to_keep else 0, rows))
        else:
            keep = logits_to_keep.tolist()
        layout = Layout(self.config, position_ids.expand(batch, rows), attention_mask, past, keep)
        logits = self.lm_head(self.model(embeddings, layout, keep, cache))
        loss = None
        if labels is not None:
            targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:][:, keep]
            loss = self.loss_function(
                logits, None, vocab_size=self.config.vocab_size, shift_labels=targets.contiguous(), **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
