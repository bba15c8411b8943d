"""A small HTTP server for a model sharded over the GPUs (or CPU processes) of a machine.

    torchrun --nproc-per-node=8 examples/serve.py MODEL --port 8000
    curl localhost:8000/generate -d '{"prompt": "Once upon a time", "max_new_tokens": 40}'

All ranks must call ``generate`` together. So rank 0 listens, puts requests into a queue, takes them out one at a time,
and broadcasts each to the other ranks. It is meant to be read: requests are not batched, and there is neither
authentication nor encryption. It listens on localhost only, unless ``--host`` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from paraxis import init, parallelize_model, warm_up
from paraxis.weights.hub import resolve_checkpoint

IDLE = 60.0
"""Seconds after which rank 0 broadcasts even without a request: ranks that wait longer than a timeout give up."""
MAX_NEW_TOKENS = 4096
"""The most tokens a request may ask for."""


@dataclass
class Request:
    """A client's request, and the future of its answer."""

    prompt: str
    max_new_tokens: int
    temperature: float
    answer: Future[str] = field(default_factory=Future)


def read_request(body: bytes) -> Request:
    """Parse the JSON of a request; a ValueError says what is wrong with it."""
    data = json.loads(body)
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object with a prompt")
    unknown = data.keys() - {"prompt", "max_new_tokens", "temperature"}
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    prompt, count, temperature = data.get("prompt"), data.get("max_new_tokens", 64), data.get("temperature", 0.0)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be a non-empty string")
    if not isinstance(count, int) or not 1 <= count <= MAX_NEW_TOKENS:
        raise ValueError(f"max_new_tokens must be a number from 1 to {MAX_NEW_TOKENS}")
    if not isinstance(temperature, (int, float)) or not 0 <= temperature <= 10:
        raise ValueError("temperature must be a number from 0 (greedy) to 10")
    return Request(prompt, count, float(temperature))


def handler_for(requests: queue.SimpleQueue[Request | None]) -> type[BaseHTTPRequestHandler]:
    """The handler of a connection, in a thread of its own: it queues the request and waits for the answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*((200, {"status": "ok"}) if self.path == "/health" else (404, {"error": "not found"})))

        def do_POST(self) -> None:
            if self.path != "/generate":
                self._send(404, {"error": "not found"})
                return
            try:
                request = read_request(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            except ValueError as error:
                self._send(400, {"error": str(error)})
                return
            requests.put(request)
            try:
                self._send(200, {"text": request.answer.result()})
            except Exception as error:
                self._send(500, {"error": f"{type(error).__name__}: {error}"})

        def _send(self, status: int, data: dict[str, Any]) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def next_job(requests: queue.SimpleQueue[Request | None] | None, control: Any) -> tuple[Any, Request | None]:
    """What all ranks do next and, on rank 0, the request. ``requests`` is None on the other ranks."""
    request: Request | None = None
    message: list[Any] = [None]
    if requests is not None:
        try:
            request = requests.get(timeout=IDLE)
            message = ["stop"] if request is None else [(request.prompt, request.max_new_tokens, request.temperature)]
        except queue.Empty:
            message = ["wait"]
    dist.broadcast_object_list(message, src=0, group=control)
    return message[0], request


@torch.no_grad()
def generate(model: Any, tokenizer: Any, device: torch.device, job: tuple[str, int, float]) -> str:
    """The continuation of a prompt. Every rank calls it with the same job."""
    prompt, count, temperature = job
    inputs = tokenizer(prompt, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
    tokens = model.generate(ids, attention_mask=mask, **options)
    return str(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Load the model on every rank; rank 0 serves, all ranks generate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a Hub id or a directory, with a tokenizer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--plan", default=None, help="a plan written by `paraxis plan --save`")
    parser.add_argument("--compile", action="store_true", help="run through Inductor")
    arguments = parser.parse_args()

    ctx = init()
    control = dist.new_group(backend="gloo")  # requests are broadcast over the host

    options = {"plan": arguments.plan, "compile": "inductor" if arguments.compile else None}
    model = parallelize_model(arguments.model, ctx, torch_dtype=arguments.dtype, **options).eval()
    folder = resolve_checkpoint(arguments.model, weights=False, group=dist.group.WORLD)
    tokenizer = AutoTokenizer.from_pretrained(folder if (folder / "tokenizer.json").exists() else arguments.model)
    seconds = warm_up(model)

    requests: queue.SimpleQueue[Request | None] | None = None
    if ctx.is_first:
        requests = queue.SimpleQueue()
        server = ThreadingHTTPServer((arguments.host, arguments.port), handler_for(requests))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: requests.put(None))
        print(f"Warmed up in {seconds:.1f} s; serving on http://{arguments.host}:{server.server_port}", flush=True)
    else:  # rank 0 says when to stop
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
    while True:
        job, request = next_job(requests, control)
        if job == "stop":
            break
        if job == "wait":
            continue
        try:
            text = generate(model, tokenizer, ctx.current_device, job)
            if request is not None:
                request.answer.set_result(text)
        except Exception as error:  # the same on all ranks: they run the same job
            if request is not None:
                request.answer.set_exception(error)


if __name__ == "__main__":
    main()
