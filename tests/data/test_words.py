"""Encoding by words gives the ids of the tokenizers library, and only where that is certain."""

import itertools
import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from orthros_jax.data import words
from orthros_jax.data.tokenizer import FileTokenizer, train_bpe

TEXTS = [
    "the cat's hat isn't here; we'll go, 'sure'\n",
    "def f(x):\n\t return  x ** 10\r\n\n",
    "they've  123 4\x0b\x0c5",
]


@pytest.fixture(scope="module")
def trained():
    return train_bpe(TEXTS * 4, 330)


def library_ids(content, texts):
    backend = Backend.from_str(content.decode())
    backend.encode_special_tokens = True
    return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]


def test_every_triple_of_kinds_of_characters(trained):
    """Words depend on kinds of characters, so every ASCII character stands once beside one of each kind."""
    kinds = ["a", "s", "'", " ", "\n", "7", "!", "ll", "\x1c", "\x7f", "\t"]
    every = [chr(i) for i in range(128)]
    texts = ["".join(parts) for parts in itertools.product(kinds, every, kinds)]
    texts += ["".join(parts) for parts in itertools.product(kinds, repeat=4)]
    ids = FileTokenizer(trained, "t", 0, 1).encode_batch(texts)
    assert [i.tolist() for i in ids] == library_ids(trained, texts)


def test_random_text_special_tokens_and_other_scripts_in_one_batch(trained):
    draw = random.Random(0)
    pieces = ["the", " cat", "'ll", "'", " ", "  ", "\n\n", "<|eos|>", "99", "_", "x" * 50, "\n", "\x1c"]
    pieces += ["é", "日本", "\ud800", "\u00a0", "\u3000\n", "\x85"]
    texts = ["".join(draw.choices(pieces, k=draw.randrange(30))) for _ in range(300)]
    ids = FileTokenizer(trained, "t", 0, 1).encode_batch(texts)
    assert all(i.dtype == np.uint32 for i in ids)
    assert [i.tolist() for i in ids] == library_ids(trained, [t.replace("\ud800", "\ufffd") for t in texts])


def test_a_full_memory_of_words_is_emptied(trained, monkeypatch):
    monkeypatch.setattr(words, "_MOST_WORDS", 3)
    tokenizer = FileTokenizer(trained, "t", 0, 1)
    for text in TEXTS * 2:
        assert [i.tolist() for i in tokenizer.encode_batch([text])] == library_ids(trained, [text])


def test_only_words_that_the_library_has_not_met_are_encoded():
    asked = []

    def encode(new):
        asked.append(new)
        return [[len(word)] for word in new]

    encoder = words.WordEncoder(encode)
    assert [i.tolist() for i in encoder(["a bb a", ""])] == [[1, 3, 2], []]
    encoder(["a bb c"])
    assert asked == [[" a", " bb", "a"], [" c"]]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": None},
        {"added_tokens": [{"id": 330, "content": "the cat", "special": False, "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False}]},
    ],
    ids=["normalizer", "prefix_space", "no_regex", "no_split", "added_token"],
)  # fmt: skip
def test_other_tokenizers_are_left_to_the_library(change, trained):
    content = json.dumps({**json.loads(trained), **change}).encode()
    assert words.cuts_like_gpt2(trained)
    assert not words.cuts_like_gpt2(content)
    texts = ["The cat", "the cat  sat"]
    ids = FileTokenizer(content, "t", 0, 1).encode_batch(texts)
    assert [i.tolist() for i in ids] == library_ids(content, texts)
