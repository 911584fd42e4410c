"""Attention of the rows of a decoding step over the key/value cache, in one pass."""
