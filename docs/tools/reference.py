"""The generated pages in docs/reference: public names from their docstrings, commands from their help.

They are committed, so that they can be read in the repository; ``make reference`` writes them again.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from .page import ROOT

GROUPS: dict[str, list[str]] = {
    "Making a model parallel": ["init", "parallelize_model", "ParallelExecutionCtx", "Config", "warm_up", "no_sync"],
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
    "Errors": [
        "CaptureError",
        "CheckpointError",
        "CollectiveError",
        "ConstraintError",
        "DivisibilityError",
        "UnsoundRuleError",
    ],
}
PACKAGES: dict[str, tuple[str, str, list[str]]] = {
    "Passes": ("passes", "what takes a captured graph to the local program of a rank.", []),
    "Layers": (
        "layers",
        "tensor-parallel layers and the vocab-parallel loss. They know no graphs and can be used by hand.",
        [],
    ),
    "Collectives": ("distributed", "collectives, and their autograd pairs.", []),
    "Rules": (
        "rules",
        "what a rule is made of. [A guide](../guides/rules.md) shows how to write one.",
        ["table", "sample", "register_rule", "Call", "Strategy", "Tensor", "UNPLACED"],
    ),
}
"""Packages with public names, what they are for, and which names are shown (all, if none are listed)."""
OTHERS = "Others"
"""What no group names."""
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
METAVARS = {int: "N", float: "NUMBER", Path: "FILE"}
"""What an option takes, by its type; TEXT otherwise."""


def api() -> str:
    """Everything that `paraxis` exports."""
    import paraxis

    grouped = {name for names in GROUPS.values() for name in names}
    others = [name for name in paraxis.__all__ if name not in grouped and not name.startswith("__")]
    lines = [
        "# Python reference",
        "",
        "<!-- generated: make reference -->",
        "",
        "The names that `paraxis` exports. Those of its packages are in [Packages](packages.md).",
    ]
    for title, names in {**GROUPS, OTHERS: others}.items():
        lines += ["", f"## {title}"] if names else []
        for name in names:
            lines += ["", f"### {name}", "", *_entry(name, getattr(paraxis, name))]
    return "\n".join(lines) + "\n"


def packages() -> str:
    """The public names of the packages."""
    lines = [
        "# Packages",
        "",
        "<!-- generated: make reference -->",
        "",
        "The public names of the packages, from their docstrings.",
    ]
    for title, (package, text, chosen) in PACKAGES.items():
        module = importlib.import_module(f"paraxis.{package}")
        lines += ["", f"## {title}", "", f"[paraxis/{package}](../../paraxis/{package}/__init__.py): {text}"]
        for name in chosen or module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                lines += ["", f"### {package}.{name}", "", *_entry(name, thing)]
            else:  # a constant
                lines += ["", f"### {package}.{name}", "", f"A `{type(thing).__name__}`.", "", _markdown(type(thing))]
    return "\n".join(lines) + "\n"


def _entry(name: str, thing: Any) -> list[str]:
    """The signature, the docstring and, of a class, its public methods."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return [f"A `{thing.__mro__[1].__name__}`.", "", _markdown(thing)]
    lines = ["```python", _signature(name, thing), "```", "", _markdown(thing)]
    for key, member in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        shown = f"{thing.__name__}.{key}" if isinstance(member, property) else _signature(key, function)
        lines += ["", "```python", shown, "```", "", _markdown(function)]
    return lines


def _signature(name: str, thing: Any) -> str:
    """How it is called, one argument per line where it is long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    shown = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    parts = [_parameter(p) for p in shown]
    star = next((i for i, p in enumerate(shown) if p.kind is p.KEYWORD_ONLY), None)
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in shown):
        parts.insert(star, "*")
    returns = "" if inspect.isclass(thing) or found.return_annotation is found.empty else found.return_annotation
    arrow = f" -> {inspect.formatannotation(returns)}".replace("'", "") if returns else ""
    line = f"{name}({', '.join(parts)}){arrow}"
    return line if len(line) <= 96 else f"{name}(\n" + "".join(f"    {p},\n" for p in parts) + f"){arrow}"


def _parameter(parameter: inspect.Parameter) -> str:
    """A parameter with its type, and with its default unless that is an object without a readable form."""
    sign = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text, kind = f"{sign}{parameter.name}", parameter.annotation
    if kind is not parameter.empty:
        text += f": {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"
    if parameter.default is not parameter.empty:
        shown = repr(parameter.default)
        text += f" = {'...' if ' at 0x' in shown or shown == '<factory>' else shown}"
    return text


def _markdown(thing: Any) -> str:
    """A docstring as Markdown: roles and double backticks as code, its sections as lists."""
    doc = re.sub(r":\w+:`~?(?:paraxis\.(?:\w+\.)*)?([^`]+)`|``([^`]+)``", r"`\1\2`", inspect.getdoc(thing) or "")
    lines: list[str] = []
    in_section = False
    for line in doc.splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            lines += [f"*{line[:-1]}*", ""]
            in_section = True
        elif in_section and re.match(r"    \S", line):
            names, colon, rest = line.strip().partition(": ")
            shown = ", ".join(f"`{n}`" for n in names.split(", ")) if colon and len(names) < 60 else names
            lines.append(f"- {shown}{colon}{rest}")
        elif in_section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return "\n".join(lines)


def cli() -> str:
    """Every command with its arguments and options."""
    from typer.main import get_command

    from paraxis.cli import COMMANDS, app

    group: Any = get_command(app)
    lines = [
        "# Commands",
        "",
        "<!-- generated: make reference -->",
        "",
        "What `paraxis COMMAND --help` says. Commands that need ranks start them on this machine, or join those that "
        "`torchrun` has started. On an error a command prints one paragraph on standard error and exits with 1, or "
        "with 2 for wrong options; `--debug` shows the traceback. A command ended by a signal exits with 128 + N.",
    ]
    for name, function in COMMANDS.items():
        command, types = group.commands[name], get_type_hints(function)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name in types and not p.hidden]
        usage = " ".join(["paraxis", name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
        lines += ["", f"## paraxis {name}", "", "```text", usage, "```", "", _help(command.help or "")]
        rows = [(f"`{p.name.upper()}`", p.help or "", "") for p in arguments]
        rows += [(_option(p, types[p.name]), p.help or "", _default(p)) for p in options]
        if rows:
            lines += ["", "| | | default |", "|---|---|---|"]
            lines += [f"| {_cell(what)} | {_cell(text)} | {default} |" for what, text, default in rows]
    return "\n".join(lines) + "\n"


def _help(text: str) -> str:
    """The help of a command, its examples as code."""
    paragraphs = []
    for part in inspect.cleandoc(text).split("\n\n"):
        words = " ".join(part.replace("\b", "").split())
        label, _, example = words.partition(": ") if re.match(r"Examples?: ", words) else ("", "", words)
        code = label or re.match(r"(paraxis|echo|torchrun) ", words)
        paragraphs.append(f"```sh\n{example}\n```" if code else words)
    return "\n\n".join(paragraphs)


def _option(option: Any, kind: Any) -> str:
    metavar = next((word for type_, word in METAVARS.items() if type_ in (kind, *get_args(kind))), "TEXT")
    value = "" if option.is_flag else f" {metavar}"
    return " / ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    value = option.default
    if value in (None, (), []) or (value is False and not option.secondary_opts):
        return ""
    return f"`{option.opts[0] if value is True else option.secondary_opts[0] if value is False else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/api.md": api,
    "docs/reference/cli.md": cli,
    "docs/reference/packages.md": packages,
}
"""The generated pages, by their path."""


def write(root: Path = ROOT) -> None:
    """Write the generated pages."""
    for path, generate in PAGES.items():
        (root / path).write_text(generate(), encoding="utf-8")
