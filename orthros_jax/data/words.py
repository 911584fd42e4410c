"""Encoding of text word by word, for tokenizers whose words do not depend on each other.

A byte-level BPE cuts text into words and merges within each, so the ids of a word are the same wherever it stands.
Cutting ASCII lines here and asking the `tokenizers` library for each new word once takes a quarter of the processor
time of cutting all of the text there, and gives the same ids. Lines with other characters are left to the library as
a whole: what counts as a letter or a space there is its own matter.
"""

import itertools
import json
import re
from collections.abc import Callable

import numpy as np

# GPT-2's pattern, for ASCII: letters, numbers and spaces are those of its \p{L}, \p{N} and \s below 128.
_GPT2_WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
# A word never goes on from a visible character to a line feed, so each side can be encoded by itself.
_BETWEEN_LINES = re.compile(r"(?<=[!-~])(?=\n)")
_GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
# About 300 bytes each.
_MOST_WORDS = 1 << 19


def cuts_like_gpt2(content: bytes) -> bool:
    """Whether a tokenizer.json splits text by GPT-2's pattern and does nothing else before its merges."""
    tokenizer = json.loads(content)
    split = tokenizer.get("pre_tokenizer") or {}
    return (
        tokenizer["model"].get("type") == "BPE"
        and not tokenizer["model"].get("dropout")
        and tokenizer.get("normalizer") is None
        and {key: split.get(key) for key in _GPT2_SPLIT} == _GPT2_SPLIT
        # Other added tokens are found in the text before it is cut.
        and all(token["special"] for token in tokenizer.get("added_tokens", []))
    )


class WordEncoder:
    """Ids of texts, from the ids of their words.

    Args:
      library_ids: returns the ids of each of some texts, without knowing of words.
    """

    def __init__(self, library_ids: Callable[[list[str]], list[list[int]]]):
        self._library_ids = library_ids
        self._ids: dict[str, list[int]] = {}

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, [length] uint32."""
        words = [_words(text) for text in texts]
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        # Sorted, so that nothing depends on the order of a set.
        new = sorted(set(itertools.chain.from_iterable(words)) - self._ids.keys())
        self._ids.update(zip(new, self._library_ids(new), strict=True))
        ids = self._ids.__getitem__
        found = [np.fromiter(itertools.chain.from_iterable(map(ids, text)), np.uint32) for text in words]
        for word in new:
            if not word.isascii():
                del self._ids[word]  # a whole line, which will hardly come again
        return found


def _words(text: str) -> list[str]:
    """Cuts a text into words, and into lines where they are not ASCII."""
    if text.isascii():
        return _GPT2_WORD.findall(text)
    lines = _BETWEEN_LINES.split(text)
    return list(itertools.chain.from_iterable(_GPT2_WORD.findall(line) if line.isascii() else [line] for line in lines))
