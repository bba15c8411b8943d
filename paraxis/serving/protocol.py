"""Requests of OpenAI's API, as far as this service knows it: from JSON to what is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError, invalid
from .fields import Fields

MOST_TOKENS = 1 << 31
MAX_N, MAX_STOP = 16, 16
MOST_DIGITS = 10
"""Of a token id."""
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
"""Fields that change nothing: they name the client, or what a service that has it would store."""
RESERVED = (
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Arguments of ``apply_chat_template`` that the service sets itself. A client's own template would be a program."""
MIN_TEMPERATURE = 1e-5
"""Below it the scores divided by the temperature are infinite, and the draw would be the most likely token anyway."""
MIN_REPETITION_PENALTY = 0.01
"""Scores are divided by it."""


@dataclass
class Ask:
    """What a client asks for.

    Attributes:
        chat: Whether it is a conversation, and not a text to continue.
        model: The name of the model; None if the client gives none.
        prompts: Texts, or token ids.
        messages, tools: Of a conversation.
        template: Further arguments of the chat template.
        max_tokens: New tokens at most; None for as many as fit.
        n: Answers to each prompt.
        stream, usage_chunk: Whether tokens are sent as they come, and the usage at the end.
        stop, stop_tokens: Texts and tokens that end an answer.
        ignore_eos: Whether the model's own stop tokens do not.
        seed: Of the draws.
        logprobs: How many of the most likely tokens to report; None for no log-probabilities.
        echo: Whether a text is returned with its prompt before it.
        sampling: What changes the scores, by its name in transformers' ``GenerationConfig``.
        penalties: (presence, frequency).
        bias: What is added to the scores of tokens.
    """

    chat: bool
    model: str | None = None
    prompts: list[Any] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage_chunk: bool = False
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    echo: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    penalties: tuple[float, float] = (0.0, 0.0)
    bias: dict[int, float] = field(default_factory=dict)


def read_chat(data: Any) -> Ask:
    """The body of ``/v1/chat/completions``."""
    fields = Fields(data)
    ask = Ask(chat=True, messages=_messages(fields.take("messages")))
    ask.tools = _tools(fields)
    template = fields.take("chat_template_kwargs", {})
    if not isinstance(template, dict):
        raise invalid("chat_template_kwargs", "must be an object")
    reserved = sorted(set(template) & set(RESERVED))
    if reserved:
        raise invalid("chat_template_kwargs", f"{reserved[0]} cannot be set by a client")
    ask.template = template
    wants = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, 0, 20)
    if top is not None and not wants:
        raise invalid("top_logprobs", "needs logprobs: true")
    ask.logprobs = (top or 0) if wants else None
    length = fields.integer("max_completion_tokens", None, 1, MOST_TOKENS)
    other = fields.integer("max_tokens", None, 1, MOST_TOKENS)
    ask.max_tokens = length if length is not None else other
    return _read_common(ask, fields)


def read_completion(data: Any) -> Ask:
    """The body of ``/v1/completions``."""
    fields = Fields(data)
    ask = Ask(chat=False, prompts=_prompts(fields.take("prompt")))
    ask.logprobs = fields.integer("logprobs", None, 0, 20)
    ask.max_tokens = fields.integer("max_tokens", 16, 1, MOST_TOKENS)
    ask.echo = fields.flag("echo")
    if ask.echo and ask.logprobs is not None:
        raise ApiError(400, "echo: not together with logprobs", "echo", "unsupported_value")
    fields.refuse("suffix", ("",), "this service does not insert text: leave it out")
    best = fields.integer("best_of", None, 1, MAX_N)
    ask = _read_common(ask, fields)
    if best is not None and best != ask.n:
        raise ApiError(400, f"best_of: {best} is not n={ask.n}; this service does not rank answers", "best_of")
    return ask


def _read_common(ask: Ask, fields: Fields) -> Ask:
    ask.model = fields.take("model")
    if ask.model is not None and not isinstance(ask.model, str):
        raise invalid("model", "must be a text")
    ask.n = fields.integer("n", 1, 1, MAX_N) or 1
    ask.stream = fields.flag("stream")
    options = fields.take("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options", "must be an object")
    ask.usage_chunk = ask.stream and bool(options.get("include_usage", False))
    ask.stop = fields.texts("stop", MAX_STOP)
    ask.stop_tokens = _tokens("stop_token_ids", fields.take("stop_token_ids", []))
    ask.ignore_eos = fields.flag("ignore_eos")
    ask.seed = fields.integer("seed", None, -(1 << 63), (1 << 63) - 1)
    ask.sampling = _sampling(fields)
    presence, frequency = (fields.number(f"{kind}_penalty", 0.0, -2.0, 2.0) for kind in ("presence", "frequency"))
    ask.penalties = presence, frequency
    ask.bias = _bias(fields.take("logit_bias", {}))
    form = fields.take("response_format", {"type": "text"})
    if not isinstance(form, dict) or form.get("type") != "text":
        raise ApiError(
            400,
            "response_format: this service writes text and does not force another format; ask for it in the prompt, "
            'and check the answer. Leave the field out, or use {"type": "text"}',
            "response_format",
            "unsupported_value",
        )
    fields.ignore(*IGNORED)
    fields.finish()
    return ask


def _sampling(fields: Fields) -> dict[str, Any]:
    """What the client says of sampling; what it does not say is the model's own."""
    limits = {
        "temperature": (0.0, 10.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (MIN_REPETITION_PENALTY, 10.0),
    }
    found: dict[str, Any] = {
        name: fields.number(name, 0.0, low, high) for name, (low, high) in limits.items() if name in fields
    }
    top_k = fields.integer("top_k", None, -1, MOST_TOKENS)
    if top_k is not None:
        found["top_k"] = max(top_k, 0)
    fewest = fields.integer("min_tokens", None, 0, MOST_TOKENS)
    if fewest:
        found["min_new_tokens"] = fewest
    found["do_sample"] = found.get("temperature", 1.0) >= MIN_TEMPERATURE and found.get("top_p") != 0
    return found


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise invalid("messages", "must be a list of messages, with at least one")
    found = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"messages.{i}", "must be an object with a role")
        message = dict(message)
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = "".join(_text_of(part, i) for part in content)
        elif content is not None and not isinstance(content, str):
            raise invalid(f"messages.{i}.content", "must be a text, or a list of parts")
        elif content is None and not message.get("tool_calls"):
            raise invalid(f"messages.{i}.content", "is missing")
        found.append(message)
    return found


def _text_of(part: Any, i: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(
        400, f"messages.{i}.content: a part of type {kind!r}; this service takes text alone", f"messages.{i}.content"
    )


def _tools(fields: Fields) -> list[Any] | None:
    tools, choice = fields.take("tools"), fields.take("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(
            400, "tool_choice: the model cannot be forced to use a tool: use 'auto' or 'none'", "tool_choice"
        )
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise invalid("tools", "must be a list of objects with a function")
    return tools if tools and choice == "auto" else None


def _prompts(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(x, str) for x in value):
            return value
        if all(_is_token(x) for x in value):
            return [value]
        if all(isinstance(x, list) and x and all(_is_token(token) for token in x) for x in value):
            return value
    raise invalid("prompt", "must be a text, a list of texts, token ids, or a list of lists of token ids")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_token(x) for x in value):
        raise invalid(name, "must be a list of token ids")
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid("logit_bias", "must be an object from token ids to numbers")
    found = {}
    for token, amount in value.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool) and -100 <= amount <= 100
        if not (isinstance(token, str) and token.isdecimal() and len(token) <= MOST_DIGITS and number):
            raise invalid("logit_bias", "must be an object from token ids to numbers between -100 and 100")
        found[int(token)] = float(amount)
    return found
