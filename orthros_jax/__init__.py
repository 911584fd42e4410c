"""Orthros in JAX: sliding-window context rows that fill one KV cache a layer, full-attention output rows."""
