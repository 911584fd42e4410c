"""Round trips, hostile text, and special tokens, through each kind of tokenizer."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from orthros_jax.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    clean_text,
    read_tokenizer,
    train_bpe,
    training_size,
)
from orthros_jax.errors import UserError

ROOT = Path(__file__).parents[2]
TEXTS = [
    "the cat sat on the mat, and the dog ate the cat's hat " * 3,
    "naïve café 🦊🦊",
    "def f(x):\n\treturn x\n",
]


@pytest.fixture(scope="module")
def trained():
    return train_bpe(TEXTS * 4, 300)


@pytest.fixture(params=["byte", "file", "unpickled"])
def tokenizer(request, trained):
    if request.param == "byte":
        return ByteTokenizer()
    made = FileTokenizer(trained, "t", 0, 1)
    return made if request.param == "file" else pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize(
    "text",
    [*TEXTS, "", " ", "\x00\x01", "👩‍👩‍👧 \U0010ffff", "a" * 1000 + "\n\n\n", "<|bos|>x<|eos|>", "日本語"],
)
def test_round_trip(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())


@pytest.mark.parametrize("text", ["x\ud800y", "\udfff", "\ud83d \ude00"])
def test_lone_surrogates_become_replacement_characters(tokenizer, text):
    cleaned = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    assert clean_text(text) == cleaned
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == cleaned


def test_a_million_characters(tokenizer):
    text = ("hat 🦊 " * 170_000)[:1_000_000]
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


def test_batches_equal_single_texts(tokenizer):
    together = tokenizer.encode_batch(TEXTS)
    for ids, text in zip(together, TEXTS, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode_batch([text])[0])


def test_special_tokens_decode_to_nothing(tokenizer):
    (ids,) = tokenizer.encode_batch(["hat"])
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "hat"


def test_byte_ids():
    assert ByteTokenizer().encode_batch(["é"])[0].tolist() == [0xC3, 0xA9]
    assert (ByteTokenizer.bos_id, ByteTokenizer.eos_id, ByteTokenizer.vocab_size) == (256, 257, 258)


def test_training_is_deterministic_across_processes(trained):
    program = (
        "import hashlib;"
        "from orthros_jax.data.tokenizer import train_bpe;"
        f"print(hashlib.sha256(train_bpe({TEXTS!r} * 4, 300)).hexdigest())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == hashlib.sha256(trained).hexdigest()


def test_trained_vocabulary(trained):
    tokenizer = FileTokenizer(trained, "t", 0, 1)
    assert tokenizer.vocab_size == 300
    assert tokenizer.vocabulary["<|bos|>"] == 0
    assert tokenizer.vocabulary["<|eos|>"] == 1
    assert tokenizer.fingerprint == hashlib.sha256(trained).hexdigest()
    assert len(tokenizer.encode_batch([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def word_tokenizer(folder, words, **changes):
    """A word-level tokenizer.json with a post-processor, truncation and padding that must all be ignored."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([word for word in words if word[0] in "<["])
    if "<s>" in words:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", words.index("<s>")), ("</s>", words.index("</s>"))]
        )
    backend.enable_truncation(2)
    backend.enable_padding(length=8, pad_token="[UNK]")
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_post_processor_truncation_and_padding_are_off(tmp_path):
    path = word_tokenizer(tmp_path, ["[UNK]", "<s>", "</s>", "a", "b"])
    tokenizer = read_tokenizer(str(path))
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a b a b", "a", ""])] == [[3, 4, 3, 4], [3], []]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 5)
    assert tokenizer.name == f"{tmp_path.name}/tokenizer.json"


def test_folder_with_a_tokenizer(tmp_path):
    path = word_tokenizer(tmp_path, ["[UNK]", "<s>", "</s>", "a"])
    assert read_tokenizer(str(tmp_path)).fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_special_tokens_from_the_configuration_beside_the_file(tmp_path):
    path = str(word_tokenizer(tmp_path, ["[UNK]", "<s>", "</s>", "<x>", "a"]))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "eos_token": {"content": "<x>"}}))
    assert (read_tokenizer(path).bos_id, read_tokenizer(path).eos_id) == (None, 3)
    # A name given by hand wins.
    named = read_tokenizer(path, bos_token="<s>", eos_token="a")
    assert (named.bos_id, named.eos_id) == (1, 4)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"bos_token": ["<s>"]}', b'{"eos_token": {"content": 1}}'])
def test_broken_configuration_beside_the_file(content, tmp_path):
    path = word_tokenizer(tmp_path, ["[UNK]", "<s>", "</s>", "a"])
    config = tmp_path / "tokenizer_config.json"
    config.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_tokenizer(str(path))
    assert str(error.value) == f"{config}: not a tokenizer configuration; repair it or move it away"


def test_vocabulary_without_special_tokens(tmp_path):
    tokenizer = read_tokenizer(str(word_tokenizer(tmp_path, ["[UNK]", "a"])))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_vocab_size_covers_gaps(tmp_path):
    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 9}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(str(tmp_path)).vocab_size == 10


def test_vocabulary_that_cannot_encode_every_text(tmp_path):
    Backend(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(str(tmp_path))
    with pytest.raises(UserError) as error:
        tokenizer.encode_batch(["a", "b"])
    assert str(error.value) == (
        f"{tmp_path.name}/tokenizer.json: cannot encode the text: WordLevel error: Missing [UNK] token from the "
        "vocabulary; use another tokenizer"
    )


def test_unknown_named_token(tmp_path):
    path = word_tokenizer(tmp_path, ["[UNK]", "a"])
    with pytest.raises(UserError) as error:
        read_tokenizer(str(path), bos_token="<bos>")
    assert str(error.value) == f"{path}: no token '<bos>' in the vocabulary; correct --bos_token"


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UserError) as error:
        read_tokenizer(f"{tmp_path}/none.json")
    assert str(error.value) == (
        f"{tmp_path}/none.json: no such tokenizer; give `byte`, a tokenizer.json, or `train:SIZE` to train a new one"
    )


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff"])
def test_file_that_is_no_tokenizer(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json of the tokenizers library"):
        read_tokenizer(str(tmp_path))


def test_training_size():
    assert training_size("byte") is None
    assert training_size("train:258") == 258
    for spec in ("train:257", "train:", "train:1e3", "train:-5"):
        with pytest.raises(UserError) as error:
            training_size(spec)
        assert str(error.value) == f"tokenizer {spec}: the size must be a whole number of at least 258"
