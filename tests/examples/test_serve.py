"""`examples/serve.py`: clients get the unsharded model's tokens, bad requests an error, and all ranks end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SERVER = Path(__file__).resolve().parents[2] / "examples" / "serve.py"
WORDS = 64


def make_model(folder: Path) -> Any:
    """Save a tiny model and a tokenizer with one token per word; the unsharded model."""
    from models.tiny import build
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = build("llama", vocab_size=WORDS, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    model.config.bos_token_id = model.config.eos_token_id = None  # no end-of-sequence token
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    table = {**{f"w{i}": i for i in range(WORDS)}, "unknown": WORDS}  # which the model cannot generate
    words = Tokenizer(models.WordLevel(table, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="unknown").save_pretrained(folder)
    return model


def post(port: int, body: Any, path: str = "/generate") -> tuple[int, Any]:
    """The status and the body of the response."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_clients_get_the_unsharded_models_tokens(tmp_path: Path) -> None:
    """Several clients at a time, bad requests in between, then SIGTERM."""
    model = make_model(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    server = subprocess.Popen(
        [*launcher, str(SERVER), str(tmp_path), "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PARAXIS_CACHE": ""},
    )
    deadline = threading.Timer(240, server.kill)
    deadline.start()
    try:
        log = ""
        for line in server.stdout or ():
            log += line
            if "serving on" in line:
                break
        assert "serving on" in log, log
        assert post(port, None, "/health") == (200, {"status": "ok"})

        prompts = [[3, 5, 7], [11, 2], [9, 8, 7, 6, 5]]
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as clients:
            answers = list(clients.map(lambda text: post(port, {"prompt": text, "max_new_tokens": 6}), texts))
        for prompt, (status, answer) in zip(prompts, answers):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
            assert status == 200 and answer["text"].split() == [f"w{token}" for token in expected.tolist()]
        status, answer = post(port, {"prompt": "w1 w2", "max_new_tokens": 5, "temperature": 1.0})
        assert status == 200 and len(answer["text"].split()) == 5

        assert post(port, b"{")[0] == 400 and post(port, [1])[0] == 400
        assert post(port, {"prompt": 3}) == (400, {"error": "prompt must be a non-empty string"})
        assert post(port, {"prompt": "w1", "max_new_tokens": 0})[0] == 400
        assert post(port, {"prompt": "w1", "top": 1}) == (400, {"error": "unknown fields: top"})
        assert post(port, {"prompt": "w1"}, "/elsewhere")[0] == 404
        assert post(port, {"prompt": "w3 w5 w7", "max_new_tokens": 6}) == answers[0], "errors must not stop the server"

        ranks = [int(x) for x in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
        assert len(ranks) >= 2
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    finally:
        deadline.cancel()
        server.kill()
        server.wait()
