"""`examples/serve.py`, run as the tutorial says."""

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
from marks import long

SERVER = Path(__file__).resolve().parents[1] / "examples" / "serve.py"
WORDS = 64


def make_model(folder: Path) -> Any:
    """A tiny model with a tokenizer of one word per token."""
    from models.tiny import build
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = build("llama", vocab_size=WORDS, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    model.config.bos_token_id = model.config.eos_token_id = None  # no token ends a text
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    table = {**{f"w{i}": i for i in range(WORDS)}, "unknown": WORDS}  # which the model never says
    words = Tokenizer(models.WordLevel(table, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="unknown").save_pretrained(folder)
    return model


def asked(port: int, body: Any, path: str = "/generate") -> tuple[int, Any]:
    """The status and the answer of the server."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@long
def test_serving(tmp_path: Path) -> None:
    """Several clients at a time get what the unsharded model says; bad requests are answered; all ranks end."""
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
    giving_up = threading.Timer(240, server.kill)
    giving_up.start()
    try:
        printed = ""
        for line in server.stdout or ():
            printed += line
            if "serving on" in line:
                break
        assert "serving on" in printed, printed
        assert asked(port, None, "/health") == (200, {"status": "ok"})

        prompts = [[3, 5, 7], [11, 2], [9, 8, 7, 6, 5]]
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as clients:
            answers = list(clients.map(lambda text: asked(port, {"prompt": text, "max_new_tokens": 6}), texts))
        for prompt, (status, answer) in zip(prompts, answers):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
            assert status == 200 and answer["text"].split() == [f"w{token}" for token in expected.tolist()]
        status, answer = asked(port, {"prompt": "w1 w2", "max_new_tokens": 5, "temperature": 1.0})
        assert status == 200 and len(answer["text"].split()) == 5

        assert asked(port, b"{")[0] == 400 and asked(port, [1])[0] == 400
        assert asked(port, {"prompt": 3}) == (400, {"error": "prompt has to be a text"})
        assert asked(port, {"prompt": "w1", "max_new_tokens": 0})[0] == 400
        assert asked(port, {"prompt": "w1", "top": 1}) == (400, {"error": "unknown: top"})
        assert asked(port, {"prompt": "w1"}, "/elsewhere")[0] == 404
        assert asked(port, {"prompt": "w3 w5 w7", "max_new_tokens": 6}) == answers[0], "it goes on after errors"

        ranks = [int(x) for x in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
        assert len(ranks) >= 2
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    finally:
        giving_up.cancel()
        server.kill()
        server.wait()
