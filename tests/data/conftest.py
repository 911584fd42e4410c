"""Data sets written by hand, token by token, so that the readers are tested apart from `prepare`."""

import json

import numpy as np
import pytest


@pytest.fixture
def write_dataset(tmp_path):
    """Returns write(name, train, heldout, ...) -> folder.

    A split is a list of shards, a shard a list of documents, a document a list of token ids.
    """

    def write(name, train, heldout=(), dtype="<u2", vocab_size=60000, fingerprint="f"):
        folder = tmp_path / name
        folder.mkdir()
        splits = {}
        for split, shards in (("train", train), ("heldout", heldout)):
            described = []
            for number, documents in enumerate(shards):
                stem = f"{split}-{number:05d}"
                tokens = np.concatenate(documents).astype(dtype)
                tokens.tofile(folder / f"{stem}.tokens")
                np.cumsum([len(d) for d in documents]).astype("<i8").tofile(folder / f"{stem}.offsets")
                described.append({"name": stem, "tokens": len(tokens), "documents": len(documents), "text_bytes": 0})
            splits[split] = {
                "tokens": sum(s["tokens"] for s in described),
                "documents": sum(s["documents"] for s in described),
                "text_bytes": 7 * sum(s["documents"] for s in described),
                "shards": described,
            }
        index = {
            "format": "orthros-tokens",
            "version": 1,
            "tokenizer": {
                "name": "hand",
                "fingerprint": fingerprint,
                "vocab_size": vocab_size,
                "bos_id": None,
                "eos_id": None,
            },
            "dtype": dtype,
            "skipped": {},
            "splits": splits,
        }
        (folder / "index.json").write_text(json.dumps(index))
        return folder

    return write
