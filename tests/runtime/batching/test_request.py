"""What a request knows of how far it has come."""

from __future__ import annotations

from paraxis.runtime.batching.request import ERROR, LENGTH, STOP, LogProbs, Request


def test_a_request_ends_at_its_limit_or_with_a_stop_token() -> None:
    request = Request("a", [1, 2], 2, frozenset({9}))
    request.add(5, LogProbs(-1.0))
    assert not request.ended and request.first_token > 0
    request.add(6, None)
    assert request.ended == LENGTH and request.finished > 0 and len(request.logprobs) == 1
    other = Request("b", [1], 5, frozenset({9}))
    other.add(9, None)
    assert other.ended == STOP and other.tokens == [9]


def test_another_thread_sees_nothing_half_done() -> None:
    class Watched(list[int]):
        def append(self, token: int) -> None:
            super().append(token)
            assert len(request.logprobs) == len(self)

    class Seen(Request):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "ended" and value:
                assert self.error == "gone" and self.finished > 0
            super().__setattr__(name, value)

    request = Seen("a", [1], 3, tokens=Watched())
    request.add(5, LogProbs(-1.0))
    request.add(6, LogProbs(-1.0))
    request.end(ERROR, "gone")
    assert request.ended == ERROR


def test_tokens_to_compute_are_those_of_the_prompt_and_then_the_last_one() -> None:
    request = Request("a", [1, 2, 3], 5)
    assert request.pending == 3 and request.next_tokens(2) == [1, 2]
    request.computed = 2
    assert request.next_tokens(1) == [3]
    request.computed = 3
    request.add(7, None)
    assert request.pending == 1 and request.next_tokens(1) == [7]
    request.computed = 0  # another one has its blocks now
    assert request.next_tokens(4) == [1, 2, 3, 7]
