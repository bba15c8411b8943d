"""The results of the zoo as a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zoo.jobs import made_with

LIMITS = {2: 0.55, 4: 0.30}
KINDS = {
    "causal-lm": "Causal language models",
    "other": "Models of other kinds",
    "module": "Plain modules",
    "size": "Sizes that are not divisible by the number of ranks",
}


def page(records: Iterable[dict[str, Any]]) -> str:
    """Markdown: a summary, then a table per kind, sorted by name."""
    records = sorted(records, key=lambda r: (r["name"].lower(), r["world"]))
    lines = [
        "# The zoo",
        "",
        "Every model is tiny, with random weights from a fixed seed, saved by `save_pretrained` (plain modules are",
        "built from the same seed on every rank), parallelized on real processes, and compared with the unsharded one",
        "in float32: outputs within 1e-4, loss within 1e-5, gradients within 1e-3 relative, greedy tokens exact. Made",
        "by `make zoo`.",
        "",
        "*Per rank* is the fraction of all parameter elements on the rank that holds most. *Per block* is the number",
        "of collectives in a repeated block. If a model has more than two per block, or more than an embedding and a",
        "head need outside of the blocks, the notes say what they are for.",
        "",
        made_with(),
        "",
    ]
    for kind, title in KINDS.items():
        chosen = [r for r in records if r.get("kind", "causal-lm") == kind]
        if chosen:
            lines += [f"## {title}", "", *_summary(chosen), "", *_table(chosen), ""]
    return "\n".join(lines)


def _summary(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for world in sorted({r["world"] for r in records}):
        mine = [r for r in records if r["world"] == world]
        right = [r for r in mine if r["status"] == "ok"]
        built = [r for r in mine if r["status"] != "not built"]
        small = [r for r in right if r["fraction"] <= LIMITS.get(world, 1.2 / world)]
        lines.append(
            f"- {world} ranks: {len(right)} of {len(built)} right; {len(small)} of those with at most "
            f"{LIMITS.get(world, 1.2 / world):.2f} of the parameters on a rank; "
            f"{sum(_per_block(r) <= 2 for r in right)} of those with at most 2 collectives per block; "
            f"{len(mine) - len(built)} not built."
        )
    return lines


ORDINARY = (
    "partial output of a row-parallel layer",
    "partial output of a vocab-parallel embedding",
    "returned to the caller",
)


def _per_block(r: dict[str, Any]) -> float:
    inside = sum(n for (_, module, _), n in r["communicated"] if "*" in module)
    return inside / max(r["layers"], 1)


def _extra(r: dict[str, Any]) -> list[str]:
    """What the collectives are for, of a model with more of them than attention and feed-forward layers need."""
    outside = sum(n for (_, module, _), n in r["communicated"] if "*" not in module)
    if _per_block(r) <= 2 and outside <= 2:
        return []
    found: dict[str, int] = {}
    for (kind, module, reason), n in r["communicated"]:
        if reason not in ORDINARY:
            name = f"{kind.replace('_', '-')} of {module or 'the result'}: {reason}"
            found[name] = found.get(name, 0) + n
    return [f"{n} {name}" for name, n in sorted(found.items(), key=lambda item: -item[1])]


def _table(records: list[dict[str, Any]]) -> list[str]:
    head = "| model | ranks | result | per rank | outputs | gradients | tokens | collectives | per block | notes |"
    return [head, "|---|---|---|---|---|---|---|---|---|---|", *(_row(r) for r in records)]


def _row(r: dict[str, Any]) -> str:
    if "fraction" not in r:
        reason = r.get("error", "").splitlines()[0][:160].replace("|", "/")
        return f"| {r['name']} | {r['world']} | **{r['status']}** | | | | | | | {reason} |"
    tokens = {True: "exact", False: "**differ**"}.get(r.get("tokens"), "")
    collectives = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in r["collectives"].items())
    notes = [f"replicated: {name}: {reason}" for name, reason in _grouped(r["replicated"])[:3]]
    if r["fraction"] > LIMITS.get(r["world"], 1.2 / r["world"]):
        notes += [
            f"{excess:.1%} of the model above a rank's share: {share:.0%} of each {name} is on a rank"
            for name, share, excess in r.get("heaviest", [])[:3]
        ]
    notes += _extra(r)[:4]
    notes += [f"graph break: {reason[:160]}" for reason in r.get("breaks", [])[:1]]
    notes += [r[key][:120] for key in ("no_gradients", "no_tokens") if key in r]
    if r.get("rounded"):
        notes.append(
            f"gradients: rounding, since the unsharded float32 ones are {r['rounding']:.0e} from float64 ones; "
            f"in float64 ours differ by {r['double']:.0e}"
        )
    status = r["status"] if r["status"] == "ok" else f"**{r['status']}**"
    cells = (r["name"], r["world"], status, f"{r['fraction']:.3f}", f"{r['outputs']:.0e}", f"{r['gradients']:.0e}")
    cells += (tokens, collectives, f"{_per_block(r):.3g}", "; ".join(notes).replace("|", "/").replace("\n", " "))
    return "| " + " | ".join(map(str, cells)) + " |"


def _grouped(replicated: list[Any]) -> list[tuple[str, str]]:
    """The same note on repeated blocks once."""
    star = lambda name: ".".join("*" if part.isdigit() else part for part in name.split("."))  # noqa: E731
    return list(dict.fromkeys((star(name), reason) for name, reason in replicated))
