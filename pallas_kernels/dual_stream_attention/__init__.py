"""Attention of a context stream (sliding window) and an output stream (causal) over the same keys."""
