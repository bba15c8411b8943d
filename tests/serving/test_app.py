"""The HTTP side of a service, on a model that counts."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from fastapi import Request
from serving.counting import events_of, fetch, make_service, serving

from paraxis.serving.app import check_key, respond
from paraxis.serving.errors import ApiError
from paraxis.serving.protocol import read_completion

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 3}


def wait_until_free(service: Any) -> None:
    """Until no request is in the batch."""
    deadline = time.monotonic() + 60
    while service.active or service.engine.scheduler.pool.used:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_in_openai_form(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service()
    logging.getLogger("paraxis.serve").propagate = True
    with serving(service) as port, caplog.at_level("INFO", "paraxis.serve"):
        status, body, _ = fetch(port, TEXT, {"model": "model", "prompt": "w5", **GREEDY, "logprobs": 1})
        choice = body["choices"][0]
        assert status == 200 and choice["text"] == "w6 w7 w8" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["w6", "w7", "w8"] and choice["logprobs"]["text_offset"] == [0, 2, 5]
        assert body["usage"]["prompt_tokens"] == 1 and body["usage"]["completion_tokens"] == 3
        message = [{"role": "user", "content": "w9"}]
        _, body, _ = fetch(port, CHAT, {"messages": message, **GREEDY, "n": 2, "logprobs": True, "top_logprobs": 2})
        assert [c["message"]["content"] for c in body["choices"]] == ["w2 w3 w4"] * 2, "after the template's w1"
        assert [c["index"] for c in body["choices"]] == [0, 1] and body["usage"]["completion_tokens"] == 6
        first = body["choices"][0]["logprobs"]["content"][0]
        assert first["token"] == "w2" and first["bytes"] == [119, 50] and len(first["top_logprobs"]) == 2
        _, body, _ = fetch(port, TEXT, {"prompt": ["w5", "w20"], "temperature": 0, "max_tokens": 2, "echo": True})
        assert [c["text"] for c in body["choices"]] == ["w5w6 w7", "w20w21 w22"]
        _, body, _ = fetch(port, TEXT, {"prompt": "w5", "temperature": 0, "max_tokens": 30, "stop": [" w9"]})
        assert body["choices"][0]["text"] == "w6 w7 w8" and body["choices"][0]["finish_reason"] == "stop"
        _, body, _ = fetch(port, TEXT, {"prompt": [5], "temperature": 0, "max_tokens": 30, "stop_token_ids": [8]})
        assert body["choices"][0]["text"] == "w6 w7" and body["choices"][0]["finish_reason"] == "stop"
        drawn = [
            fetch(port, TEXT, {"prompt": "w5", "seed": 4, "temperature": 3})[1]["choices"][0]["text"] for _ in "ab"
        ]
        assert drawn[0] == drawn[1]
        status, models, _ = fetch(port, "/v1/models")
        assert models["data"][0]["id"] == "model" and fetch(port, "/v1/models/model")[0] == 200
        assert fetch(port, "/health")[:2] == (200, service.state())
        page = fetch(port, "/metrics")[1]
        assert 'paraxis_requests_total{path="/v1/completions",status="200"}' in page
        assert "<title>paraxis serve</title>" in fetch(port, "/")[1] and fetch(port, "/elsewhere")[0] == 404
        wait_until_free(service)
    lines = [record.getMessage() for record in caplog.records]
    assert any("/v1/completions 200 prompt_tokens=1 tokens=3" in line for line in lines)
    assert not any("w5" in line for line in lines), "prompts are not logged"


def test_streams_say_the_same_in_pieces() -> None:
    service = make_service()
    with serving(service) as port:
        body = {"messages": [{"role": "user", "content": "w9"}], **GREEDY, "n": 2, "stream": True, "logprobs": True}
        status, text, headers = fetch(port, CHAT, {**body, "stream_options": {"include_usage": True}})
        events = events_of(text)
        assert status == 200 and headers["content-type"].startswith("text/event-stream") and events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 6 and events[-2]["choices"] == []
        choices = [event["choices"][0] for event in events[:-2]]
        for index in (0, 1):
            own = [choice for choice in choices if choice["index"] == index]
            assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "length"
            assert "".join(choice["delta"].get("content", "") for choice in own) == "w2 w3 w4"
            logprobs = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert [entry["token"] for entry in logprobs] == ["w2", "w3", "w4"]
        events = events_of(fetch(port, TEXT, {"prompt": "w5", **GREEDY, "stream": True, "echo": True})[1])
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "w5w6 w7 w8"


def test_wrong_requests_get_the_reason() -> None:
    service = make_service(api_key="secret", max_body=2000, max_tokens=4)
    with serving(service) as port:
        assert fetch(port, TEXT, {"prompt": "w5"})[0] == 401 and fetch(port, "/v1/models", key="wrong")[0] == 401
        assert fetch(port, "/health")[0] == 200, "a load balancer has no key"

        def refused(body: Any, path: str = TEXT) -> tuple[int, str]:
            status, answer, _ = fetch(port, path, body, "secret")
            return status, answer["error"]["message"]

        assert refused({"prompt": "w5", "model": "other"}) == (404, "there is no model 'other' here: use 'model'")
        assert refused(b"{")[0] == 400 and refused([1]) == (400, "the body must be a JSON object")
        assert refused({"prompt": "w5 " * 1000})[0] == 413
        assert refused({"prompt": "\ud800"}) == (400, "the body has half of a surrogate pair, which no text has")
        assert refused({"prompt": "w5", "\udfff": 1})[0] == 400
        assert refused({"prompt": "w5", "temperature": 10**400})[0] == 400
        assert refused({"prompt": [10**400]})[0] == 400
        for kind in ("text/plain", "application/x-www-form-urlencoded"):  # what a browser sends without asking
            status, answer, _ = fetch(port, TEXT, {"prompt": "w5"}, "secret", kind)
            assert status == 415 and answer["error"]["code"] == "unsupported_media_type"
        assert refused({"prompt": list(range(64))})[0] == 400 and refused({"prompt": [64]})[0] == 400
        assert refused({"prompt": [3] * 64})[1].startswith("the prompt has 64 tokens, and prompt and answer together")
        assert refused({"prompt": ""})[1] == "prompt: has no tokens"
        assert refused({"prompt": "w1", "logit_bias": {"99": 1}})[0] == 400
        service.tokenizer.chat_template = None
        assert "no chat template" in refused({"messages": [{"role": "user", "content": "w1"}]}, CHAT)[1]
        body = {"prompt": "w5", "temperature": 0, "max_tokens": 50, "ignore_eos": True}
        assert fetch(port, TEXT, body, "secret")[1]["usage"]["completion_tokens"] == 4, "the service's own limit"


def test_a_key_may_have_any_characters() -> None:
    service = make_service(api_key="schlüssel")
    for sent, right in (("schlüssel", True), ("schlussel", False)):
        value = f"Bearer {sent}".encode()
        request = Request({"type": "http", "method": "GET", "path": "/", "headers": [(b"authorization", value)]})
        if right:
            check_key(service, request)
        else:
            with pytest.raises(ApiError):
                check_key(service, request)
    service.engine.stop(abort=True)


def test_a_full_queue_answers_429_and_takes_requests_later() -> None:
    service = make_service(max_batch=1, max_queue=2)
    service.engine.runner.seconds = 0.05
    body = {"prompt": "w5", "temperature": 0, "max_tokens": 8}
    with serving(service) as port, ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda _: fetch(port, TEXT, body), range(8)))
        statuses = [status for status, _, _ in found]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
        assert all(int(headers["retry-after"]) >= 1 for status, _, headers in found if status == 429)
        assert fetch(port, TEXT, {**body, "n": 4})[0] == 400, "it would never fit"
        assert fetch(port, TEXT, body)[0] == 200
        wait_until_free(service)


@pytest.mark.parametrize("streams", [False, True])
def test_clients_that_go_away_free_their_place(streams: bool) -> None:
    service = make_service()
    service.engine.runner.seconds = 0.02
    with serving(service) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"prompt": "w5", "temperature": 0, "max_tokens": 60, "stream": streams})
        connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
        if streams:
            connection.getresponse().read(20)
        else:
            time.sleep(0.2)
        assert service.active
        connection.close()
        wait_until_free(service)
        assert service.engine.counters.tokens < 55, "it did not run to its end"


def test_a_client_that_leaves_before_the_first_event_frees_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """Between the first piece, which is waited for, and the response that would send it."""
    service = make_service()
    service.engine.runner.seconds = 0.02
    logging.getLogger("paraxis.serve").propagate = True

    async def run() -> None:
        body = {"prompt": "w5", "temperature": 0, "max_tokens": 60, "stream": True}
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            while not messages:
                await asyncio.sleep(0.01)
            return messages.pop(0)

        async def send(message: Any) -> None:
            await asyncio.sleep(0)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": headers, "query_string": b""}
        request = Request(scope, receive)
        response = await respond(service, request, read_completion)
        assert len(service.active) == 1

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        await response(scope, gone, send)
        assert not service.active

    try:
        with caplog.at_level("INFO", "paraxis.serve"):
            asyncio.run(run())
        assert [" 499 " in record.getMessage() for record in caplog.records] == [True]
        wait_until_free(service)
    finally:
        service.engine.stop(abort=True)


def test_requests_have_a_deadline() -> None:
    service = make_service(timeout=0.3)
    service.engine.runner.seconds = 0.05
    with serving(service) as port:
        status, body, _ = fetch(port, TEXT, {"prompt": "w5", "temperature": 0, "max_tokens": 60})
        assert (status, body["error"]["code"]) == (504, "timeout")
        streamed = fetch(port, TEXT, {"prompt": "w5", "temperature": 0, "max_tokens": 60, "stream": True})[1]
        assert events_of(streamed)[-1]["error"]["code"] == "timeout"
        wait_until_free(service)


def test_a_failed_batch_answers_503_to_all() -> None:
    service = make_service(max_batch=2)
    service.engine.runner.seconds = 0.05
    with serving(service) as port, ThreadPoolExecutor(5) as clients:
        pending = [clients.submit(fetch, port, TEXT, {"prompt": "w5", "max_tokens": 60}) for _ in range(5)]
        deadline = time.monotonic() + 60
        while len(service.active) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        service.engine.runner.failure = "rank 1 is gone"
        assert [future.result()[0] for future in pending] == [503] * 5
        assert fetch(port, TEXT, {"prompt": "w5"})[0] == 503 and fetch(port, "/health")[0] == 503


def test_a_draining_service_ends_what_it_has_begun() -> None:
    service = make_service()
    service.engine.runner.seconds = 0.02
    with serving(service) as port, ThreadPoolExecutor(1) as clients:
        pending = clients.submit(fetch, port, TEXT, {"prompt": "w5", "temperature": 0, "max_tokens": 20})
        deadline = time.monotonic() + 60
        while not service.active:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        service.draining = True
        status, body, headers = fetch(port, TEXT, {"prompt": "w5"})
        assert status == 503 and headers["retry-after"] and "shutting down" in body["error"]["message"]
        assert fetch(port, "/health")[1]["status"] == "draining"
        assert pending.result()[0] == 200
