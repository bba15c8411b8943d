"""``paraxis serve`` on two ranks: clients get what the unsharded model generates, and no process is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.helpers import call

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from serving.counting import TEMPLATE, WORDS, events_of, fetch, word_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def make_model(folder: Path) -> Any:
    """Save a tiny model, and a tokenizer with one token per word; the unsharded model."""
    from models.tiny import build

    model = build("llama", vocab_size=WORDS, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    model.config.bos_token_id = model.config.eos_token_id = None  # no end-of-sequence token
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    word_tokenizer(TEMPLATE).save_pretrained(folder)
    return model


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """A running service: its process, its port, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from paraxis.cli import main; main()", "serve", str(folder), "--tp", "2"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--kv-cache", "0.01", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PARAXIS_CACHE": ""},
    )
    deadline = threading.Timer(400, process.kill)
    deadline.start()
    log: list[str] = []
    ready = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            log.append(line)
            if "serving on" in line:
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        ready.wait()
        assert any("serving on" in line for line in log), "".join(log)
        yield process, port, log
    finally:
        deadline.cancel()
        process.kill()
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, by rank."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = [x for x in environment if x.startswith(b"RANK=")]
        if rank and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append((int(rank[0][5:]), int(pid)))
    return [pid for _, pid in sorted(found)]


def generated(model: Any, prompt: list[int], count: int, **options: Any) -> str:
    """What the unsharded model generates."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, **options}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, pad_token_id=0, **options)
    return " ".join(f"w{token}" for token in found[0, len(prompt) :].tolist())


def test_clients_get_the_unsharded_models_tokens(tmp_path: Path) -> None:
    """Many at a time, greedy and drawn, at once and in pieces; then SIGTERM, which lets a request end."""
    model = make_model(tmp_path)
    name = tmp_path.name
    with serve(tmp_path, "--max-batch", "4") as (process, port, log):
        prompts = [[(7 * i + j * j) % WORDS for j in range(i + 1)] for i in range(12)]
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        bodies = [{"model": name, "prompt": text, "max_tokens": 8, "temperature": 0} for text in texts]
        right = [generated(model, prompt, 8) for prompt in prompts]
        with ThreadPoolExecutor(12) as clients:
            found = list(clients.map(lambda body: fetch(port, TEXT, body), bodies))
            assert [body["choices"][0]["text"] for _, body, _ in found] == right
            streamed = list(clients.map(lambda body: fetch(port, TEXT, {**body, "stream": True}), bodies))
        for text, (_, events, _) in zip(right, streamed):
            assert "".join(event["choices"][0]["text"] for event in events_of(events)[:-1]) == text
        torch.manual_seed(11)
        drawn = generated(model, prompts[3], 6, do_sample=True, temperature=0.7, top_k=9, top_p=1.0)
        options = {"temperature": 0.7, "top_k": 9, "top_p": 1, "seed": 11, "max_tokens": 6}
        assert fetch(port, TEXT, {"prompt": texts[3], **options})[1]["choices"][0]["text"] == drawn
        body = {"messages": [{"role": "user", "content": texts[5]}], "max_tokens": 4, "temperature": 0}
        chat = fetch(port, CHAT, body)[1]["choices"][0]["message"]["content"]
        assert chat == generated(model, [*prompts[5], 1], 4)
        assert fetch(port, TEXT, {"prompt": "w1", "model": "other"})[0] == 404
        if find_spec("openai") is not None:
            use_the_openai_client(port, name, right[2], texts[2])
        ranks = ranks_of(process)
        assert len(ranks) == 2
        with ThreadPoolExecutor(1) as clients:
            last = clients.submit(fetch, port, TEXT, {"prompt": "w1", "max_tokens": 60, "temperature": 0})
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert last.result()[0] in (200, 503)
        assert process.wait(60) == 0, "".join(log)
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert sum(f"{TEXT} 200 " in line for line in log) >= 25 and not any("w3" in line for line in log)


def use_the_openai_client(port: int, name: str, right: str, text: str) -> None:
    """OpenAI's own client: completion, conversation, streams, stop, n, seed, log-probabilities, errors."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    assert [each.id for each in client.models.list()] == [name]
    greedy: dict[str, Any] = {"model": name, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(prompt=text, logprobs=2, **greedy)
    assert answer.choices[0].text == right and answer.usage is not None and answer.usage.completion_tokens == 8
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.token_logprobs or ()) == 8
    pieces = client.completions.create(prompt=text, stream=True, **greedy)
    assert "".join(piece.choices[0].text for piece in pieces) == right
    stop = right.split()[3]
    cut = client.completions.create(prompt=text, stop=[f" {stop}"], **greedy).choices[0]
    assert cut.finish_reason == "stop" and cut.text == right[: right.index(f" {stop}")]
    messages: Any = [{"role": "user", "content": text}]
    chat = client.chat.completions.create(messages=messages, n=2, logprobs=True, top_logprobs=3, **greedy)
    assert len({choice.message.content for choice in chat.choices}) == 1
    logprobs = chat.choices[1].logprobs
    assert logprobs is not None and len((logprobs.content or ())[0].top_logprobs) == 3
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **greedy
    )
    parts = list(stream)
    joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert joined == chat.choices[0].message.content and parts[-1].usage is not None
    seeded = [client.completions.create(model=name, prompt=text, seed=5).choices[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=text)
    with pytest.raises(openai.BadRequestError, match="does not force another format"):
        client.chat.completions.create(model=name, messages=messages, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError, match="the prompt has 70 tokens"):
        client.completions.create(model=name, prompt="w1 " * 70)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_service(tmp_path: Path, victim: int) -> None:
    """Every client gets an answer or an error within 15 s, and no process is left."""
    make_model(tmp_path)
    body = {"prompt": "w1", "max_tokens": 60, "temperature": 0}
    with serve(tmp_path) as (process, port, log), ThreadPoolExecutor(16) as clients:
        assert fetch(port, TEXT, body)[0] == 200
        ranks, until = ranks_of(process), time.monotonic() + 15

        def ask_again(_: int) -> list[int]:
            found = []
            while time.monotonic() < until:
                try:
                    found.append(fetch(port, TEXT, body)[0])
                except OSError:  # rank 0 is gone: nobody listens
                    found.append(0)
                if found[-1] != 200:
                    break
            return found

        pending = [clients.submit(ask_again, i) for i in range(16)]
        time.sleep(0.7)
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.monotonic()
        statuses = [future.result() for future in pending]
        assert all(found[-1] in (0, 503) and set(found[:-1]) <= {200} for found in statuses), statuses
        assert process.wait(15) == 1, "".join(log)
        assert time.monotonic() - killed < 15
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_wrong_options_are_said_before_ranks_start(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--api-key is empty" in call("serve", folder, "--api-key", " ").stderr
    assert call("serve", folder, "--port", "70000").exit_code == 2
    assert call("serve", "/nowhere/at/all").exit_code == 1
    monkeypatch.setattr("paraxis.cli.serve.find_spec", lambda _: None)
    missing = call("serve", folder)
    assert missing.exit_code == 2 and "pip install 'paraxis[serve]'" in missing.stderr
