"""The HTTP side of a service: paths, keys, limits, streams, and a line in the log for each request."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .protocol import Ask, read_chat, read_completion
from .responses import Responses
from .service import Answer, Service

logger = logging.getLogger("paraxis.serve")
PAGE = Path(__file__).with_name("page.html")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of half of a character: without its other half it cannot be encoded, as a response or by a tokenizer."""


class Record:
    """What the log says of a request."""

    def __init__(self, path: str) -> None:
        self.path, self.identity, self.started = path, uuid.uuid4().hex, time.perf_counter()
        self.answers: list[Answer] = []
        self.status = 500

    def write(self, service: Service, prompt: Any) -> None:
        """One line, and the counters."""
        seconds = time.perf_counter() - self.started
        service.metrics.ended(self.path, self.status, seconds)
        asked = sum(len(answer.request.prompt) for answer in self.answers)
        got = sum(answer.read for answer in self.answers)
        times = [a.request.first_token - a.request.arrived for a in self.answers if a.request.first_token > 0]
        first = f"{min(times):.3f}s" if times else "-"
        shown = f" prompt={prompt!r}" if service.options.log_prompts and prompt is not None else ""
        logger.info(
            "%s %s %d prompt_tokens=%d tokens=%d ttft=%s total=%.3fs%s",
            self.identity[:12],
            self.path,
            self.status,
            asked,
            got,
            first,
            seconds,
            shown,
        )


def make_app(service: Service) -> FastAPI:
    """The application."""
    app = FastAPI(title="paraxis serve", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        answer = ApiError(500, f"the service made a mistake: {type(error).__name__}", code="internal_error")
        return JSONResponse(answer.body(), answer.status)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Any) -> Response:
        error = ApiError(404, f"there is nothing at {request.url.path}")
        return JSONResponse(error.body(), error.status)

    @app.get("/health")
    async def health() -> Response:
        state = service.state()
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.render_metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": policy})

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        check_key(service, request)
        return JSONResponse({"object": "list", "data": [describe_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        check_key(service, request)
        if name != service.options.name:
            raise ApiError(404, f"there is no model {name!r} here", "model", "model_not_found")
        return JSONResponse(describe_model(service))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await respond(service, request, read_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await respond(service, request, read_completion)

    return app


def describe_model(service: Service) -> dict[str, Any]:
    """The model, in OpenAI's form."""
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "paraxis",
        "max_model_len": service.max_length,
    }


def check_key(service: Service, request: Request) -> None:
    """Raise without the right key. The time that takes does not depend on where a wrong one differs."""
    key = service.options.api_key
    if key is None:
        return
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(sent.strip().encode("latin-1", "replace"), key.encode())  # the bytes of the header
    if scheme.lower() != "bearer" or not same:
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


async def read_json(service: Service, request: Request) -> Any:
    """The JSON of a request. A browser asks before it sends some to another site, which this service does not allow: a
    page of the Internet cannot use a service on the machine of the person who reads it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"the Content-Type is {kind or 'missing'}: use application/json", code="unsupported_media_type"
        )
    try:
        body = await asyncio.wait_for(receive_body(service, request), service.options.timeout)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {service.options.timeout:g} s", code="timeout") from error
    try:
        found = json.loads(body)
        if SURROGATE.search(body):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body has half of a surrogate pair, which no text has") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


async def receive_body(service: Service, request: Request) -> bytes:
    """The bytes of a body, up to the limit."""
    limit, body = service.options.max_body, bytearray()
    declared = request.headers.get("content-length", "")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def respond(service: Service, request: Request, read: Callable[[Any], Ask]) -> Response:
    """Answer a request; one line in the log when that is done."""
    record, ask = Record(request.url.path), None
    try:
        check_key(service, request)
        ask = read(await read_json(service, request))
        service.check_open(ask)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(None, service.prompts_of, ask)
        service.check_open(ask)
        record.answers = service.start(ask, prompts)
        deadline = loop.time() + service.options.timeout
        responses = Responses(ask, record.identity, service.options.name, service.tokenizer)
        if ask.stream:
            return await stream(service, request, record, ask, responses, deadline)
        body = await complete(service, request, record, responses, deadline)
        record.status = 200
        return JSONResponse(body)
    except ApiError as error:
        record.status = error.status
        raise
    except asyncio.CancelledError:
        record.status = 499
        raise
    finally:
        if record.status != 0:
            for answer in record.answers:
                service.release(answer)
            record.write(service, _shown(ask))


async def complete(
    service: Service, request: Request, record: Record, responses: Responses, deadline: float
) -> dict[str, Any]:
    """The response with all answers. If the client goes away meanwhile, they are cancelled."""

    async def text_of(answer: Answer) -> str:
        return "".join([piece async for piece, _ in service.pieces(answer, deadline)])

    texts = await while_connected(request, asyncio.gather(*map(text_of, record.answers)))
    return responses.full(record.answers, texts)


async def while_connected(request: Request, awaited: Awaitable[Any]) -> Any:
    """Wait for a result, but not longer than the client does."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    wanted, gone = asyncio.ensure_future(awaited), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ApiError(499, "the client has closed the connection")
        return await wanted
    finally:
        gone.cancel()
        if wanted.cancel():
            await asyncio.wait({wanted})


async def stream(
    service: Service, request: Request, record: Record, ask: Ask, responses: Responses, deadline: float
) -> Response:
    """Answers by server-sent events, as they come. The first piece is waited for: what fails until then is an error
    with a status of its own."""
    events = _events(service, record, responses, deadline)
    try:
        first = await while_connected(request, anext(events))
    except BaseException:
        await events.aclose()  # type: ignore[attr-defined]
        raise
    record.status = 0  # from now on the stream writes the log
    status = 499

    async def body() -> AsyncIterator[str]:
        nonlocal status
        try:
            yield first
            async for event in events:
                yield event
            status = 200
        except ApiError as error:
            status = error.status
            yield f"data: {json.dumps(error.body())}\n\n"
        except Exception:
            status = 500
            raise

    async def end() -> None:
        await events.aclose()  # type: ignore[attr-defined]
        for answer in record.answers:
            service.release(answer)
        record.status = status
        record.write(service, _shown(ask))

    return EventStream(body(), end)


class EventStream(StreamingResponse):
    """Server-sent events, and what is done after them, also if the client is gone before the first one.

    The ``finally`` of a generator does not do: one that was not begun ends without it.
    """

    def __init__(self, body: AsyncIterator[str], end: Callable[[], Awaitable[None]]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.end()


async def _events(service: Service, record: Record, responses: Responses, deadline: float) -> AsyncIterator[str]:
    """The events of a stream, of all answers side by side."""
    pieces: asyncio.Queue[tuple[Answer, Any]] = asyncio.Queue()

    async def follow(answer: Answer) -> None:
        try:
            async for text, tokens in service.pieces(answer, deadline):
                pieces.put_nowait((answer, (text, len(answer.text.tokens), len(tokens))))
            pieces.put_nowait((answer, None))
        except Exception as error:
            pieces.put_nowait((answer, error))

    tasks = [asyncio.ensure_future(follow(answer)) for answer in record.answers]
    left, reported, begun = len(tasks), dict.fromkeys(record.answers, 0), set[Answer]()
    try:
        while left:
            answer, piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if answer not in begun:
                begun.add(answer)
                opening = responses.first(answer)
                if opening is not None:
                    yield event(opening)
            if piece is None:
                left -= 1
                yield event(responses.last(answer))
                continue
            text, known, _ = piece
            start, reported[answer] = reported[answer], known
            if text or (responses.ask.logprobs is not None and known > start):
                yield event(responses.piece(answer, text, start, known - start))
        if responses.ask.usage_chunk:
            yield event(responses.usage(record.answers))
        yield "data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _shown(ask: Ask | None) -> Any:
    return None if ask is None else ask.messages if ask.chat else ask.prompts
