"""Text to token ids and back: bytes, a tokenizer.json, or a byte-level BPE trained on the corpus itself.

Tokenizers here only encode text. BOS and EOS are added in one place, `orthros_jax.data.parts`, never by a
tokenizer's own post-processor, and a special token spelled out in a document is encoded as plain text.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from orthros_jax.data.words import WordEncoder, cuts_like_gpt2
from orthros_jax.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
TRAINED_BOS = "<|bos|>"
TRAINED_EOS = "<|eos|>"
TRAINED_BOS_ID, TRAINED_EOS_ID = 0, 1
# A tokenizer.json does not say which of its tokens open and close a document; these are the usual spellings.
BOS_NAMES = (TRAINED_BOS, "<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES = (TRAINED_EOS, "</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[EOS]")
BYTES = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
# The token of a single byte where the vocabulary lacks the character.
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _byte_level_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: itself if it prints, else the next one free."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(BYTES + n): b for n, b in enumerate(others)}


_BYTE_LEVEL = _byte_level_characters()


class Tokenizer(Protocol):
    """What data preparation and sampling need.

    Attributes:
      name: for messages and the index, for example "byte".
      fingerprint: SHA-256 of whatever determines the encoding.
      vocab_size: one more than the largest id.
      bos_id: id that opens a document, None where the vocabulary has none.
      eos_id: id that closes a document, None where the vocabulary has none.
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without BOS and EOS.

        Raises:
          UserError: the tokenizer is not fit for the text.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids; special tokens give nothing, broken UTF-8 gives U+FFFD."""
        ...

    def piece(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that a token adds behind other text, which may be part of a character only.

        Special tokens and ids that the vocabulary does not have add nothing.
        """
        ...


def clean_text(text: str) -> str:
    """Replaces each lone surrogate, which UTF-8 cannot hold, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then BOS 256 and EOS 257."""

    name = "byte"
    fingerprint = hashlib.sha256(b"utf-8 bytes 0..255, bos 256, eos 257").hexdigest()
    vocab_size = BYTES + 2
    bos_id: int | None = BYTES
    eos_id: int | None = BYTES + 1

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(clean_text(text).encode(), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.piece, ids)).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < BYTES else b""


def byte_tokenizer_file() -> bytes:
    """The byte tokenizer as a tokenizer.json, for other programs: same ids, special tokens included."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = {TRAINED_BOS: ByteTokenizer.bos_id, TRAINED_EOS: ByteTokenizer.eos_id}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": dict(sorted(_BYTE_LEVEL.items(), key=lambda item: item[1])) | special,
            "merges": [],
        },
    }
    return json.dumps(document, indent=1, ensure_ascii=False).encode()


class FileTokenizer:
    """A tokenizer.json, in the format of the `tokenizers` library.

    Args:
      content: the file's bytes.
      name: for messages and the index.
      bos_id: id that opens a document, or None.
      eos_id: id that closes a document, or None.

    Raises:
      UserError: the content is not a tokenizer.
    """

    def __init__(self, content: bytes, name: str, bos_id: int | None, eos_id: int | None):
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{name}: not a tokenizer.json of the tokenizers library: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.content = content
        self.name = name
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocabulary.values(), default=-1) + 1
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._encode = WordEncoder(self._library_ids) if cuts_like_gpt2(content) else self._library_ids

    def __reduce__(self):
        # The backend's own pickle forgets encode_special_tokens.
        return FileTokenizer, (self.content, self.name, self.bos_id, self.eos_id)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.asarray(ids, np.uint32) for ids in self._encode([clean_text(text) for text in texts])]

    def _library_ids(self, texts: list[str]) -> list[list[int]]:
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{self.name}: cannot encode the text: {error}; use another tokenizer") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def piece(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if "ByteLevel" in self._decoders and all(character in _BYTE_LEVEL for character in token):
            return bytes(_BYTE_LEVEL[character] for character in token)
        if "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        # Decoders treat the first token of a text apart: they strip its leading space.
        before, after = self._backend.decode(self._anchor), self._backend.decode([*self._anchor, token_id])
        return after[len(before) :].encode()

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        return {i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @functools.cached_property
    def _decoders(self) -> set[str]:
        """Types of the decoder and of those that it is a sequence of."""
        decoder = json.loads(self.content).get("decoder") or {}
        return {part["type"] for part in (decoder, *decoder.get("decoders", ()))} if decoder else set()

    @functools.cached_property
    def _anchor(self) -> list[int]:
        """A token that is plain text by itself, if there is one."""
        texts = ((i, self._backend.decode([i])) for i in sorted(self.vocabulary.values()))
        return next(([i] for i, text in texts if text.isascii() and text.isalnum()), [])


def read_tokenizer(spec: str, bos_token: str | None = None, eos_token: str | None = None) -> Tokenizer:
    """Opens `byte` or a tokenizer.json file (or a folder that holds one).

    BOS and EOS are those named here, else those of a tokenizer_config.json beside the file, else the first
    well-known spelling in the vocabulary, else None.

    Raises:
      UserError: no such file, not a tokenizer, a broken tokenizer_config.json, or a named token that it does not have.
    """
    if spec == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(spec)
    path = path / TOKENIZER_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{spec}: no such tokenizer; give `byte`, a tokenizer.json, or `train:SIZE` to train a new one")
    content = path.read_bytes()
    if content == byte_tokenizer_file():
        return ByteTokenizer()
    vocabulary = FileTokenizer(content, str(path), None, None).vocabulary
    config = path.with_name("tokenizer_config.json")
    declared = _declared_tokens(config) if config.is_file() else {}
    bos_id = _special_id(vocabulary, str(path), bos_token, declared, "bos_token", BOS_NAMES)
    eos_id = _special_id(vocabulary, str(path), eos_token, declared, "eos_token", EOS_NAMES)
    return FileTokenizer(content, f"{path.resolve().parent.name}/{path.name}", bos_id, eos_id)


def _declared_tokens(path: Path) -> dict[str, str | None]:
    """Those of "bos_token" and "eos_token" that a tokenizer_config.json states, null included."""
    wrong = UserError(f"{path}: not a tokenizer configuration; repair it or move it away")
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        raise wrong from None
    if not isinstance(config, dict):
        raise wrong
    stated = {key: config[key] for key in ("bos_token", "eos_token") if key in config}
    spelled = {key: token.get("content") if isinstance(token, dict) else token for key, token in stated.items()}
    if not all(token is None or isinstance(token, str) for token in spelled.values()):
        raise wrong
    return spelled


def _special_id(
    vocabulary: dict[str, int],
    path: str,
    named: str | None,
    declared: dict[str, str | None],
    key: str,
    known: tuple[str, ...],
) -> int | None:
    if named is not None:
        if named not in vocabulary:
            raise UserError(f"{path}: no token {named!r} in the vocabulary; correct --{key}")
        return vocabulary[named]
    if key in declared:
        token = declared[key]
        return None if token is None else vocabulary.get(token)
    return next((vocabulary[token] for token in known if token in vocabulary), None)


def training_size(spec: str) -> int | None:
    """Returns SIZE of `train:SIZE`, None for any other tokenizer.

    Raises:
      UserError: SIZE is not a number of at least 258, the bytes with BOS and EOS.
    """
    if not spec.startswith("train:"):
        return None
    size = spec.removeprefix("train:")
    if not size.isdecimal() or int(size) < BYTES + 2:
        raise UserError(f"tokenizer {spec}: the size must be a whole number of at least {BYTES + 2}")
    return int(size)


def train_bpe(texts: Iterable[str], size: int) -> bytes:
    """Trains a byte-level BPE (GPT-2's pre-tokenisation) and returns its tokenizer.json.

    The same texts give the same bytes. Ids 0 and 1 are BOS and EOS; a small corpus may give fewer than `size`
    entries.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[TRAINED_BOS, TRAINED_EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_cleaned(texts), trainer)
    return backend.to_str(pretty=True).encode()


def _cleaned(texts: Iterable[str]) -> Iterator[str]:
    return (clean_text(text) for text in texts)
