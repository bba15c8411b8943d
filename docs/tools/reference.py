"""The reference, as Markdown: the public names from their docstrings, the commands from their help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

GROUPS: dict[str, list[str]] = {
    "Making a model parallel": ["parallelize_model", "ParallelExecutionCtx", "Config", "warm_up"],
    "Plans": ["plan_model", "Plan", "explain_plan", "compare_plans", "report_plan", "Machine"],
    "Saving and resuming": ["save_state", "load_state"],
    "Sharded tensors and parameters": ["ShardedTensor", "ParameterMeta", "ParameterSlice", "HashableSlice"],
    "Rules": ["register_rule"],
    "The torch.compile backend by hand": [
        "parallelize_backend",
        "MetaAwareMethodsPatcher",
        "initialize_parameter_meta",
        "move_model_to_device",
        "ensure_divisibility",
    ],
    "Errors": ["CaptureError", "CheckpointError", "CollectiveError", "ConstraintError", "UnsoundRuleError"],
}
OTHERS = "Others"
VALUES = {int: "N", float: "NUMBER", Path: "FILE"}
"""What an option takes, by its type; text otherwise."""
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")


# -- Python ------------------------------------------------------------------------------------------------------------


def api() -> str:
    """Everything that `paraxis` exports."""
    import paraxis

    known = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, OTHERS: [n for n in paraxis.__all__ if n not in known and not n.startswith("__")]}
    lines = ["# Python reference", "", f"The public names of paraxis {paraxis.__version__}, from their docstrings."]
    for title, names in groups.items():
        if names:
            lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### {name}", "", *entry(name, getattr(paraxis, name))]
    return "\n".join(lines) + "\n"


def entry(name: str, thing: Any) -> list[str]:
    """The signature, the docstring and, of a class, its public methods."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return [f"A `{thing.__mro__[1].__name__}`.", "", prose(inspect.getdoc(thing) or "")]
    lines = ["```python", signature(name, thing), "```", "", prose(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            shown = f"{thing.__name__}.{key}" if isinstance(member, property) else signature(key, function)
            lines += ["", "```python", shown, "```", "", prose(inspect.getdoc(function) or "")]
    return lines


def signature(name: str, thing: Any) -> str:
    """How it is called, one argument per line where it is long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    kept = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    parts = [_part(p) for p in kept]
    star = next((i for i, p in enumerate(kept) if p.kind is p.KEYWORD_ONLY), None)
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in kept):
        parts.insert(star, "*")
    returns = "" if inspect.isclass(thing) or found.return_annotation is found.empty else f" -> {_type(found)}"
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= 96 else f"{name}(\n" + "".join(f"    {p},\n" for p in parts) + f"){returns}"


def _type(found: inspect.Signature) -> str:
    return inspect.formatannotation(found.return_annotation).replace("'", "")


def _part(parameter: inspect.Parameter) -> str:
    """A parameter with its type and its default, where that does not depend on the place in memory."""
    sign = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = parameter.annotation
    text = f"{sign}{parameter.name}"
    if kind is not parameter.empty:
        text += f": {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"
    if parameter.default is not parameter.empty:
        shown = repr(parameter.default)
        text += f" = {'...' if ' at 0x' in shown or shown == '<factory>' else shown}"
    return text


def prose(doc: str) -> str:
    """A docstring as Markdown: roles and double backticks as code, its sections as lists."""
    doc = re.sub(r":\w+:`~?(?:paraxis\.(?:\w+\.)*)?([^`]+)`", r"`\1`", doc)
    doc = re.sub(r"``([^`]+)``", r"`\1`", doc)
    lines: list[str] = []
    section = False
    for line in doc.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            lines += [f"*{line[:-1]}*", ""]
            section = True
        elif section and re.match(r"    \S", line):
            names, colon, rest = line.strip().partition(": ")
            shown = ", ".join(f"`{n}`" for n in names.split(", ")) if colon and len(names) < 60 else names
            lines.append(f"- {shown}{': ' if colon else ''}{rest}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and not line.strip()
            lines.append(line)
    return "\n".join(lines)


# -- commands ----------------------------------------------------------------------------------------------------------


def cli() -> str:
    """Every command with its arguments and options."""
    from typer.main import get_command

    from paraxis.cli import COMMANDS, app

    group: Any = get_command(app)
    lines = [
        "# Commands",
        "",
        "What `paraxis COMMAND --help` says. Commands with ranks start them on this machine, or are the ranks that "
        "`torchrun` has started. An error is one paragraph on standard error and exit code 1, or 2 for options "
        "that make no sense; `--debug` shows its traceback. A signal gives 128 and its number.",
    ]
    for name, function in COMMANDS.items():
        command, types = group.commands[name], get_type_hints(function)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name in types]
        usage = " ".join(["paraxis", name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
        lines += ["", f"## paraxis {name}", "", "```text", usage, "```", "", _described(command.help or "")]
        rows = [(f"`{p.name.upper()}`", p.help or "", "") for p in arguments]
        rows += [(_names(p, types[p.name]), p.help or "", _default(p)) for p in options]
        if rows:
            lines += ["", "| | | default |", "|---|---|---|"]
            lines += [f"| {_cell(what)} | {_cell(text)} | {default} |" for what, text, default in rows]
    return "\n".join(lines) + "\n"


def _described(text: str) -> str:
    """The help of a command; examples as code."""
    paragraphs = []
    for part in inspect.cleandoc(text).split("\n\n"):
        words = " ".join(part.split())
        label, _, example = words.partition(": ") if re.match(r"Examples?: ", words) else ("", "", words)
        if label or re.match(r"(paraxis|echo) ", words):
            paragraphs.append(f"```sh\n{example}\n```")
        else:
            paragraphs.append(words)
    return "\n\n".join(paragraphs)


def _names(option: Any, kind: Any) -> str:
    wanted = next((word for type_, word in VALUES.items() if type_ in (kind, *get_args(kind))), "TEXT")
    value = "" if option.is_flag else f" {wanted}"
    return " / ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    value = option.default
    if value in (None, (), []) or (value is False and not option.secondary_opts):
        return ""
    return f"`{option.opts[0] if value is True else option.secondary_opts[0] if value is False else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {"api": api, "cli": cli}
