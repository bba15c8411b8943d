"""From tokens to text as they come, and the texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""


class TextStream:
    """The text of tokens that come one by one.

    Text is held back while it may still change: an unfinished character, and what may be the beginning of a stop
    string. All that was handed out, joined, is the text of all tokens, up to a stop string.

    Args:
        tokenizer: Decodes tokens.
        stop: Texts that end the answer.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.offsets: list[int] = []
        """Where in the text each token begins; one that ends a character begins where the character does."""
        self.text = ""
        """What was decoded so far, with what is held back."""
        self.sent = 0
        self.stopped = False
        self._begin = self._read = 0
        self._longest = max((len(text) for text in self.stop), default=0)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, as ``generate``'s users decode it."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def add(self, tokens: Sequence[int]) -> str:
        """Text that can be handed out after these tokens."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            self.offsets.append(len(self.text))
            self._decode()
        return self._hand_out(self._held_back())

    def finish(self) -> str:
        """What was held back, when there are no more tokens."""
        if not self.stopped:
            rest = self.decode(self.tokens[self._begin :])
            known = self.decode(self.tokens[self._begin : self._read])
            self._append(rest[len(known) :])
        return self._hand_out(0)

    def _decode(self) -> None:
        known = self.decode(self.tokens[self._begin : self._read])
        now = self.decode(self.tokens[self._begin :])
        if now.endswith(_BROKEN) or len(now) <= len(known):
            return
        self._begin, self._read = self._read, len(self.tokens)
        self._append(now[len(known) :])

    def _append(self, new: str) -> None:
        searched = max(0, len(self.text) - self._longest)
        self.text += new
        places = [at for at in (self.text.find(text, searched) for text in self.stop) if at >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        if self.stopped:
            return 0
        for count in range(min(self._longest - 1, len(self.text) - self.sent), 0, -1):
            end = self.text[-count:]
            if any(text.startswith(end) for text in self.stop):
                return count
        return 0

    def _hand_out(self, held: int) -> str:
        end = max(len(self.text) - held, self.sent)
        found, self.sent = self.text[self.sent : end], end
        return found
