"""Text as it comes: joined, it is the text of all tokens, up to a stop string."""

from __future__ import annotations

import random

import pytest

from paraxis.serving.text import TextStream


class Bytes:
    """A tokenizer with a token per byte."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """Unfinished characters become a mark, as in byte-level tokenizers; token 0 is special."""
        return bytes(token for token in tokens if token).decode("utf-8", "replace")


def pieces(text: str, stop: tuple[str, ...], seed: int = 0) -> tuple[list[str], TextStream]:
    """What is handed out when tokens come in random groups."""
    draw, stream, tokens = random.Random(seed), TextStream(Bytes(), stop), list(text.encode())
    found = []
    while tokens and not stream.stopped:
        count = draw.randrange(1, 4)
        found.append(stream.add(tokens[:count]))
        tokens = tokens[count:]
    return [*found, stream.finish()], stream


@pytest.mark.parametrize("text", ["plain", "größer als 日本 🙂!", "", "\ufffd ends \ufffd"])
def test_pieces_are_the_text(text: str) -> None:
    for seed in range(5):
        found, stream = pieces(text, (), seed)
        assert "".join(found) == text and not stream.stopped


def test_unfinished_characters_are_held_back() -> None:
    found, _ = pieces("日本", ())
    assert all("\ufffd" not in piece for piece in found)
    stream = TextStream(Bytes())
    assert stream.add([0xE6, 0x97]) == "" and stream.finish() == "\ufffd", "the answer ended in a character"


@pytest.mark.parametrize(
    ("text", "stop", "right"),
    [
        ("one two three", (" two",), "one"),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("abcabd", ("abd",), "abc"),
        ("日本語", ("本",), "日"),
        ("nothing here", ("xyz",), "nothing here"),
        ("ends with st", ("stop",), "ends with st"),
    ],
)
def test_stop_strings_end_the_text_before_them(text: str, stop: tuple[str, ...], right: str) -> None:
    for seed in range(5):
        found, stream = pieces(text, stop, seed)
        assert "".join(found) == right and stream.stopped == (right != text)


def test_tokens_begin_where_their_characters_do() -> None:
    stream = TextStream(Bytes())
    stream.add(list("aü日b".encode()))
    assert stream.offsets == [0, 1, 1, 2, 2, 2, 3]


def test_special_tokens_are_no_text() -> None:
    stream = TextStream(Bytes())
    assert stream.add([0, 97, 0, 98]) + stream.finish() == "ab" and stream.tokens == [0, 97, 0, 98]
