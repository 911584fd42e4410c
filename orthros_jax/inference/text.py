"""Text out of tokens, one at a time: characters that spread over tokens, and stop strings that do the same."""

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """The text of one sequence of tokens while it grows.

    All that `push` and `finish` return, joined, is the text of the tokens up to the first stop string. No piece of it
    ends within a character or within what may become a stop string: such text is held back until more tokens tell.
    Bytes that are not UTF-8 become U+FFFD, as in `bytes.decode(errors="replace")`.

    The first stop string is the one that is complete first, whatever its start, so that the result does not depend on
    where one token ends and the next begins; of several that end together it is the longest.

    Args:
      piece: bytes that a token adds, `orthros_jax.data.tokenizer.Tokenizer.piece`.
      stop: strings that end the text, none of them empty.

    Attributes:
      stopped: whether a stop string was found.
    """

    def __init__(self, piece: Callable[[int], bytes], stop: Sequence[str] = ()):
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._piece = piece
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain by now and was not returned before."""
        return self._release(self._decoder.decode(self._piece(token)))

    def finish(self) -> str:
        """Returns what is held back; no token comes after it."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stop if stop in text]
        if found:
            self.stopped = True
            end, length = min(found)
            certain, self._held = end + length, ""
        else:
            certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
            self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))
