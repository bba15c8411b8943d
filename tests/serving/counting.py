"""A service whose model counts, the token after n is n + 1, and its HTTP server in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from paraxis.runtime.batching.engine import Engine
from paraxis.runtime.batching.step import Step
from paraxis.serving.options import ServeOptions
from paraxis.serving.service import Service

WORDS = 64


def make_model() -> Any:
    """What a service looks at of a model: its configurations, and how it processes scores."""
    from models.tiny import build

    model = build("llama", vocab_size=WORDS, num_hidden_layers=1, pad_token_id=None, bos_token_id=None)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


class Runner:
    """Runs steps without a model; as slowly as ``seconds`` says, and until ``failure`` is set."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.cache = SimpleNamespace(blocks=64, block_size=4)
        self.seconds = 0.0
        self.failure = ""

    def run(self, step: Step) -> torch.Tensor:
        """Logits of the rows."""
        time.sleep(self.seconds)
        if self.failure:
            raise RuntimeError(self.failure)
        return 9 * torch.eye(WORDS)[(torch.from_numpy(step.ids)[step.rows] + 1) % WORDS]


class Alone:
    """The channel of a single rank."""

    alone = is_first = True

    def send(self, message: Any) -> None:
        """To nobody."""


def word_tokenizer(template: str | None = None) -> Any:
    """A tokenizer with one token per word, ``w0`` to ``w63``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {**{f"w{i}": i for i in range(WORDS)}, "unknown": WORDS}  # which the model cannot generate
    words = Tokenizer(models.WordLevel(table, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="unknown", chat_template=template)


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w1"


def make_service(**options: Any) -> Service:
    """A service, whose batch runs in a thread."""
    engine = Engine(Runner(), Alone(), options.get("max_batch", 4), 16, seed=0)  # type: ignore[arg-type]

    def run() -> None:
        try:
            engine.run()
        except RuntimeError:
            pass

    threading.Thread(target=run, daemon=True).start()
    chosen = ServeOptions("org/model", "model", **options)
    return Service(engine, make_model(), word_tokenizer(TEMPLATE), chosen)


@contextmanager
def serving(service: Service) -> Iterator[int]:
    """The port on which a service listens."""
    import uvicorn

    from paraxis.serving.app import make_app

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        service.engine.stop(abort=True)


def fetch(
    port: int, path: str, body: Any = None, key: str | None = None, kind: str = "application/json"
) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers; JSON is parsed."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, _parsed(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, _parsed(error), dict(error.headers)


def _parsed(answer: Any) -> Any:
    text = answer.read().decode()
    return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text


def events_of(text: str) -> list[Any]:
    """The data of server-sent events."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in found]
