"""The models in float64 NumPy: one sequence at a time, loops over rows, nothing shared with the code.

Both streams are written out in full: O duplicates the embeddings of the rows that predict, every layer runs
both with shared weights over the keys and values of C, and the head reads O alone.
"""

import math
from typing import Any

import numpy as np


def logits(params, config, tokens, segment_ids, out_rows, positions=None, cast=lambda x: x):
    """Scores [P, V] of the output rows of one sequence.

    Args:
      params: nested dictionary of the model's parameters.
      config: ModelConfig.
      tokens, segment_ids: T integers each; segment 0 is padding.
      out_rows: P context rows to duplicate; -1 gives a row of NaN, which nothing may depend on.
      positions: T rotary positions; by default they restart at 0 with each segment.
      cast: rounding to the compute type, applied where a result is stored; identity gives the exact model.
    """
    params = _float64(params)
    stored = _map(cast, params) if config.compute_dtype == "bfloat16" else params
    layers = [_map(lambda x, i=i: x[i], stored["layers"]) for i in range(config.num_layers - 1)]
    layers.append(stored["last_layer"])
    rows = [t for t in out_rows if t >= 0]
    embedding = stored["embedding"]["kernel"]
    context = np.stack([embedding[t] for t in tokens])
    output = np.stack([embedding[tokens[t]] for t in rows])
    if positions is None:
        positions = _positions(segment_ids)
    for index, layer in enumerate(layers):
        is_last = index == config.num_layers - 1
        context, output = _layer(layer, config, context, output, rows, segment_ids, positions, is_last, cast)
    head = embedding.T if config.tie_embeddings else stored["head"]["kernel"]
    scores = np.full((len(out_rows), head.shape[1]), np.nan)
    scores[np.array(out_rows) >= 0] = cast(_rms_norm(output, stored["final_norm"]["scale"], config.norm_eps)) @ head
    return scores


def frequencies(config):
    """Angle per position of each channel pair, float64."""
    result = []
    for pair in range(config.head_dim // 2):
        frequency = config.rope_base ** (-2 * pair / config.head_dim)
        if config.rope_scaling == "llama3":
            wavelength = 2 * math.pi / frequency
            longest = config.rope_original_length / config.rope_low_frequency_factor
            shortest = config.rope_original_length / config.rope_high_frequency_factor
            if wavelength > longest:
                frequency /= config.rope_factor
            elif wavelength >= shortest:
                low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
                smooth = (config.rope_original_length / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / config.rope_factor + smooth * frequency
        result.append(frequency)
    return np.array(result)


def rotate(heads, position, config):
    """Rotates the pairs (i, i + H / 2) of every head of one row [N, H]."""
    half = heads.shape[1] // 2
    result = np.empty(heads.shape)
    for i, frequency in enumerate(frequencies(config)):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        result[:, i] = heads[:, i] * cos - heads[:, i + half] * sin
        result[:, i + half] = heads[:, i + half] * cos + heads[:, i] * sin
    return result


def _layer(layer, config, context, output, rows, segment_ids, positions, is_last, cast):
    attention = layer["attention"]
    is_orthros = config.kind == "orthros"
    context_window = None if config.kind == "transformer" else config.window
    output_window = config.output_window if is_orthros else context_window

    h_context = cast(_rms_norm(context, layer["attention_norm"]["scale"], config.norm_eps))
    h_output = cast(_rms_norm(output, layer["attention_norm"]["scale"], config.norm_eps))
    key = cast(np.einsum("td,dkh->tkh", h_context, attention["key"]["kernel"]))
    value = cast(np.einsum("td,dkh->tkh", h_context, attention["value"]["kernel"]))
    if config.qk_norm:
        key = cast(_rms_norm(key, attention["key_norm"]["scale"], config.norm_eps))
    key = cast(_rotate_heads(key, positions, config))

    def query(stream, h, row_positions):
        separate = is_orthros and config.query_sharing == "separate"
        kernel = attention[f"query_{stream}" if separate else "query"]["kernel"]
        q = cast(np.einsum("td,dnh->tnh", h, kernel))

        def scale_offset(q):
            if not is_orthros or config.query_sharing != "scale_offset":
                return q
            pair = attention[f"scale_offset_{stream}"]
            return cast(cast(pair["gamma"] * q) + pair["beta"])

        def norm(q):
            if not config.qk_norm:
                return q
            return cast(_rms_norm(q, attention["query_norm"]["scale"], config.norm_eps))

        q = norm(scale_offset(q)) if config.scale_offset_position == "before_norm" else scale_offset(norm(q))
        return cast(_rotate_heads(q, row_positions, config))

    def residual(x, attended):
        x = cast(x + cast(np.einsum("tnh,nhd->td", attended, attention["output"]["kernel"])))
        h = cast(_rms_norm(x, layer["ffn_norm"]["scale"], config.norm_eps))
        gate, up = cast(h @ layer["ffn"]["gate"]["kernel"]), cast(h @ layer["ffn"]["up"]["kernel"])
        gated = cast(cast(gate / (1 + np.exp(-gate))) * up)
        return cast(x + cast(gated @ layer["ffn"]["down"]["kernel"]))

    q_output = query("output", h_output, [positions[t] for t in rows])
    attended = cast(_attend(q_output, rows, key, value, output_window, segment_ids))
    new_output = residual(output, attended)
    if is_last:
        return None, new_output
    q_context = query("context", h_context, positions)
    attended = cast(_attend(q_context, range(len(context)), key, value, context_window, segment_ids))
    return residual(context, attended), new_output


def _attend(q, rows, key, value, window, segment_ids):
    result = np.zeros(q.shape)
    group = q.shape[1] // key.shape[1]
    for p, t in enumerate(rows):
        if segment_ids[t] == 0:
            continue
        seen = [j for j in range(t + 1) if segment_ids[j] == segment_ids[t] and (window is None or t - window < j)]
        for n in range(q.shape[1]):
            scores = key[seen, n // group] @ q[p, n] / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            result[p, n] = weights / weights.sum() @ value[seen, n // group]
    return result


def _positions(segment_ids):
    result = []
    for t, segment in enumerate(segment_ids):
        result.append(result[-1] + 1 if t and segment == segment_ids[t - 1] else 0)
    return result


def _rotate_heads(x, positions, config):
    return np.stack([rotate(row, position, config) for row, position in zip(x, positions, strict=True)])


def _rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def _map(function, tree) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    return function(tree)


def _float64(tree):
    return _map(lambda x: np.asarray(x, np.float64), tree)
