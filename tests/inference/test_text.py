"""Streamed text against the text of all tokens at once, for every kind of tokenizer and any way to cut the text."""

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from orthros_jax.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from orthros_jax.inference.text import TextStream

TEXTS = [
    "the cat sat on the mat, and the dog ate the cat's hat " * 3,
    "naïve café 🦊🦊, 👩‍👩‍👧 and e\u0301, 日本語 \U0010ffff",
    "def f(x):\n\treturn x  # \x00\r\n",
]
REPLACEMENT = "\ufffd"


def byte_level():
    """A BPE with special and plain added tokens, one with a space in it, which no byte-level character is."""
    backend = Backend.from_str(train_bpe(TEXTS * 4, 330).decode())
    backend.add_special_tokens([AddedToken("<|turn|>", special=True)])
    backend.add_tokens([AddedToken("<think>"), AddedToken("two words"), AddedToken("日記")])
    return FileTokenizer(backend.to_str().encode(), "bpe", 0, 1)


def sentence_piece():
    """Llama 2's kind: a space is part of the word after it, and unknown characters are byte tokens."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "é", "▁🦊", "\n"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]  # pyright: ignore
    )
    return FileTokenizer(backend.to_str().encode(), "sentence piece", 0, 1)


def word_piece():
    words = ["[UNK]", "the", "cat", "##s", "##é", ",", "🦊"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return FileTokenizer(backend.to_str().encode(), "word piece", None, None)


def metaspace():
    words = ["<unk>", "▁the", "▁cat", "s", "▁"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return FileTokenizer(backend.to_str().encode(), "metaspace", None, None)


KINDS = {kind.__name__: kind for kind in (ByteTokenizer, byte_level, sentence_piece, word_piece, metaspace)}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def plain_id(tokenizer) -> int:
    """A token of whole, visible characters."""
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).isalnum())


def streamed(tokenizer, ids, stop=()) -> list[str]:
    stream = TextStream(tokenizer.piece, stop)
    pieces = [stream.push(int(i)) for i in ids if not stream.stopped]
    return [*pieces, stream.finish()]


def test_random_tokens_give_the_text_of_them_all(tokenizer):
    """Behind one plain token, since the text of all drops a space at its start."""
    random = np.random.default_rng(0)
    first = plain_id(tokenizer)
    for _ in range(300):
        # Ids beyond the vocabulary are those of a model whose vocabulary is padded.
        ids = random.integers(0, tokenizer.vocab_size + 3, random.integers(0, 40)).tolist()
        known = [i for i in ids if i < tokenizer.vocab_size]
        text = "".join(streamed(tokenizer, ids))
        expected = tokenizer.decode([first, *known]).removeprefix(tokenizer.decode([first]))
        if tokenizer.name == "sentence piece":
            # There one wrong byte spoils the characters of all byte tokens beside it.
            text, expected = (t.replace(REPLACEMENT, "") for t in (text, expected))
            assert len(text) >= len(expected)
            continue
        assert text == expected


@pytest.mark.parametrize("kind", [ByteTokenizer, byte_level, sentence_piece])
def test_no_piece_breaks_a_character(kind):
    """Every piece of a real text is whole characters, though its tokens are not."""
    tokenizer = kind()
    broken = 0
    for text in TEXTS:
        (ids,) = tokenizer.encode_batch([text])
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == text
        assert not any(REPLACEMENT in piece for piece in pieces)
        broken += sum(REPLACEMENT in tokenizer.decode([i]) for i in ids)
        assert pieces[-1] == ""
    assert broken > 3


def test_text_comes_as_soon_as_it_is_certain():
    tokenizer = ByteTokenizer()
    assert streamed(tokenizer, "aé🦊!".encode()) == ["a", "", "é", "", "", "", "🦊", "!", ""]


@pytest.mark.parametrize("kind", [ByteTokenizer, byte_level])
def test_bytes_that_are_not_utf_8(kind):
    """What is broken shows as soon as that is certain; a character cut off at the end shows at the end."""
    tokenizer = kind()
    ids = {piece: i for i in range(tokenizer.vocab_size - 1, -1, -1) if len(piece := tokenizer.piece(i)) == 1}
    assert len(ids) == 256
    bytes_in = [b"\xff", b"\xe2", b"\x82", b"a", b"\xf0", b"\x9f", b"\xa6"]
    assert streamed(tokenizer, [ids[byte] for byte in bytes_in]) == [
        REPLACEMENT,
        "",
        "",
        REPLACEMENT + "a",
        "",
        "",
        "",
        REPLACEMENT,
    ]
    for size in range(1, 60):  # no limit on a run of them
        run = np.random.default_rng(size).integers(128, 256, size).astype(np.uint8).tobytes()
        text = "".join(streamed(tokenizer, [ids[bytes([byte])] for byte in run]))
        assert text == run.decode(errors="replace")


def test_byte_tokens_beside_a_broken_one_keep_their_characters():
    tokenizer = sentence_piece()
    ids = [tokenizer.vocabulary[f"<0x{byte:02X}>"] for byte in b"\xe2\x82\xac\xff"]
    assert streamed(tokenizer, ids) == ["", "", "€", REPLACEMENT, ""]


@pytest.mark.parametrize("kind", [sentence_piece, metaspace, word_piece])
def test_a_continuation_keeps_the_space_before_its_first_word(kind):
    tokenizer = kind()
    word = next(i for token, i in tokenizer.vocabulary.items() if token.endswith("cat"))
    assert tokenizer.decode([word]) == "cat"
    assert streamed(tokenizer, [word]) == [" cat", ""]


def test_special_tokens_have_no_text():
    tokenizer = byte_level()
    ids = [tokenizer.vocabulary[token] for token in ("<|bos|>", "<think>", "<|turn|>", "two words", "日記", "<|eos|>")]
    assert streamed(tokenizer, ids) == ["", "<think>", "", "two words", "日記", "", ""]
    assert streamed(ByteTokenizer(), [256, 97, 257]) == ["", "a", "", ""]


# Stop strings


def first_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """The text before the first stop string, found by reading character by character."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def run_stop(pieces: list[str], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(lambda number: pieces[number].encode(), stop)
    out = [stream.push(number) for number in range(len(pieces)) if not stream.stopped]
    return [*out, stream.finish()], stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "out", "stopped"),
    [
        # Text that turns out not to be the stop string is given back once.
        (["a\n", "\nb"], ["\n\nc"], ["a", "\n\nb", ""], False),
        # A stop string over three tokens, with text behind it in the last of them.
        (["one EN", "D OF", " IT two", "three"], ["END OF IT"], ["one ", "", "", ""], True),
        # It overlaps with itself.
        (["aab", "aab", "aac"], ["aabaac"], ["", "aab", "", ""], True),
        # Complete first wins, though the other starts before it.
        (["x1", "23"], ["123", "2"], ["x", "1", ""], True),
        # Of two that end together the longer one.
        (["x12"], ["2", "12"], ["x", ""], True),
        # The whole text.
        (["stop"], ["stop"], ["", ""], True),
        (["", ""], ["stop"], ["", "", ""], False),
        # What was held back for the stop string is given back at the end.
        (["x sto"], ["stop"], ["x ", "sto"], False),
        (["x", "y"], [], ["x", "y", ""], False),
    ],
)
def test_stop_strings(pieces, stop, out, stopped):
    assert run_stop(pieces, stop) == (out, stopped)


def test_stop_strings_against_reading_character_by_character():
    """Random texts over few letters, with characters of several bytes, cut anywhere, even within a character."""
    random = np.random.default_rng(0)
    letters, found = np.array(["a", "b", "é", "🦊"]), 0
    for _ in range(3000):
        text = "".join(random.choice(letters, random.integers(0, 14)))
        stop = ["".join(random.choice(letters, random.integers(1, 5))) for _ in range(random.integers(0, 4))]
        content = text.encode()
        cuts = np.sort(random.integers(0, len(content) + 1, random.integers(0, 8))).tolist()
        pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        stream = TextStream(pieces.__getitem__, stop)
        out = "".join(stream.push(n) for n in range(len(pieces)) if not stream.stopped) + stream.finish()
        assert (out, stream.stopped) == first_stop(text, stop)
        found += stream.stopped
    assert 500 < found < 2500


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(ByteTokenizer().piece, ["a", ""])
