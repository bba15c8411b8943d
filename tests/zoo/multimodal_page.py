"""The page of multimodal models: what is right, wrong, not built and not run, by task, and why."""

from __future__ import annotations

import re
from datetime import date

from zoo.jobs import Record, versions
from zoo.multimodal_cases import AT_FOUR, KNOWN, TASKS, all_names, task_of

OUTPUTS, GRADIENTS = 1e-4, 1e-3
"""The largest errors that count as right: absolute of outputs, relative of gradients."""
LEAST = 0.9
"""The least fraction of a tower's matmul work that ranks should share."""


def page(records: dict[int, list[Record]]) -> str:
    """Markdown: a table per task, then what could not be built."""
    lines = [
        "# Multimodal models",
        "",
        "Tiny models with random weights, parallelized by `parallelize_model(folder, ctx)` without example inputs,",
        f"against the unsharded model: outputs within {OUTPUTS:g}, gradients within {GRADIENTS:g} (larger differences",
        "count as rounding, *in float64*, if that agrees to 1e-9 and 1e-6, and the unsharded model rounds as much),",
        "greedy tokens exact, with inputs of the modality and with text alone. The inputs are not those that the plan",
        "was made with: other sizes, several images where a model takes them. *Fraction*: parameters on a rank.",
        "*Unplanned*: parameters that these inputs use and no dummy input does, sharded for memory only. *Shared*: the",
        "matmul work that is in operators of which every rank does a part, of the tower that shares least. Made by",
        "`make multimodal`.",
        "",
        f"{date.today().isoformat()}. {made_by(records)}",
        "",
    ]
    for world, found in sorted(records.items()):
        built = [r for r in found if r["status"] != "not built"]
        good = [r for r in built if r["status"] == "ok"]
        small = sum(r["fraction"] <= 1.1 / world for r in good)
        exact = [r for r in good if answer(r) == "yes"]
        modal = [r for r in exact if r["modality"]]
        first = sum(r["task"] in TASKS[:2] for r in modal)
        lines += [
            f"- **{world} ranks**: {len(exact)} of {len(built)} models are right, and {len(good) - len(exact)} more in "
            f"float64 only. With images, videos or audio, {first} are of the first two tasks and {len(modal) - first} "
            f"of the others. {small} have at most {1.1 / world:.2f} of "
            f"the parameters on a rank. Of {shared(good, LEAST)} of the {shared(good)} whose matmul work was counted, "
            "every tower does at least 90% of it sharded."
        ]
    lines += ["", "## By task", "", *by_task(records)]
    first = records[min(records)]
    others = {(r["name"], world): r for world, found in records.items() if world != min(records) for r in found}
    for task in TASKS:
        rows = [r for r in first if r["task"] == task and r["status"] != "not built"]
        if not rows:
            continue
        more = [world for world in sorted(records) if world != min(records)]
        lines += ["", f"## {title(task)}", ""]
        names = ["type", "class", "inputs", "fraction", "unplanned", "shared", "right", *(f"{w} ranks" for w in more)]
        names += ["generates", "graph"]
        lines += [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [row(r, [others.get((r["name"], w)) for w in more]) for r in sorted(rows, key=lambda r: r["name"])]
    lines += exceptions(records)
    missing = sorted((r for r in first if r["status"] == "not built"), key=lambda r: r["name"])
    if missing:
        lines += ["", "## Not built", "", "| type | class | reason |", "|---|---|---|"]
        lines += [f"| {' | '.join(r['name'].split(':'))} | {cell(r['error'])} |" for r in missing]
    left = [name for name in names_at(min(records)) if name not in {r["name"] for r in first}]
    if left:
        lines += ["", "## Not run", "", f"{len(left)} types, for lack of time: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def by_task(records: dict[int, list[Record]]) -> list[str]:
    """A table of how many are right of each task."""
    worlds = sorted(records)
    heads = [f"{what}, {world} ranks" for world in worlds for what in ("right", "wrong", "not run")]
    lines = [f"| task | {' | '.join(heads)} | not built |", f"|{'---|' * (2 + len(heads))}"]
    totals: list[int] = [0] * (len(heads) + 1)
    for task in TASKS:
        counts = []
        for world in worlds:
            rows = [r for r in records[world] if r["task"] == task]
            run_ = {r["name"] for r in rows}
            right_ = sum(r["status"] == "ok" for r in rows)
            wrong = sum(r["status"] in ("wrong", "failed") for r in rows)
            counts += [right_, wrong, sum(task_of(n) == task and n not in run_ for n in names_at(world))]
        counts.append(sum(r["task"] == task and r["status"] == "not built" for r in records[worlds[0]]))
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(f"| {title(task)} | {' | '.join(map(str, counts))} |")
    lines.append(f"| **all** | {' | '.join(f'**{n}**' for n in totals)} |")
    return lines


def shared(records: list[Record], least: float = 0.0) -> int:
    """How many models have no tower that shares less of its matmul work than this."""
    return sum(all(x >= least for x in r["towers"].values()) for r in records if "towers" in r)


def names_at(world: int) -> list[str]:
    """The models that run on this number of ranks: all on two, a selection on more."""
    return [name for name in all_names() if world == 2 or name.partition(":")[0] in AT_FOUR]


def exceptions(records: dict[int, list[Record]]) -> list[str]:
    """Right models of which a rank holds more than 1.1 times its share, or does more than 10% of a tower alone."""
    rows = []
    for world, found in sorted(records.items()):
        for record in sorted((r for r in found if r["status"] == "ok"), key=lambda r: r["name"]):
            name = f"{record['name'].partition(':')[2]} | {world}"
            if record["fraction"] > 1.1 / world:
                why = [
                    f"`{each}`: {held:.0%} on a rank, {more:.1%} of the model too much: {reason}"
                    for each, held, more, reason in record.get("excess", ())
                ]
                rows.append(f"| {name} | {record['fraction']:.2f} of the parameters | {cell('; '.join(why), 1000)} |")
            for tower, share in record.get("towers", {}).items():
                if share < LEAST:
                    why = [
                        f"`{each}`, {part:.0%}: {reason}"
                        for each, part, reason in record.get("unshared", {}).get(tower, ())
                    ]
                    rows.append(f"| {name} | {share:.0%} of `{tower}` | {cell('; '.join(why), 1000)} |")
    head = ["", "## Exceptions", "", "What a rank holds or does more than its share of, as the plan gives the reason."]
    return [*head, "", "| class | ranks | what | reason |", "|---|---|---|---|", *rows] if rows else []


def row(record: Record, others: list[Record | None]) -> str:
    """The row of a model that was built."""
    kind, _, cls = record["name"].partition(":")
    right_ = [answer(record), *("" if other is None else answer(other) for other in others)]
    if "outputs" not in record:
        return f"| {kind} | {cls} | {record.get('modality', '')} | | | | {' | '.join(right_)} | | |"
    generated = {True: "yes", False: "NO"}.get(record.get("tokens"), "")  # type: ignore[call-overload]
    graph = "several" if record["breaks"] else "one"
    shared = min(record.get("towers", {}).values(), default=record.get("work"))
    cells = (kind, cls, record["modality"] or "text", f"{record['fraction']:.2f}", str(record["unplanned"]))
    cells += ("" if shared is None else f"{shared:.0%}",)
    return f"| {' | '.join((*cells, *right_, generated, graph))} |"


def answer(record: Record) -> str:
    """Whether a model is right, and why not."""
    if record["status"] == "ok":
        single = record.get("outputs", 0.0) < OUTPUTS and record.get("gradients", 0.0) < GRADIENTS
        return "yes" if single else "in float64"
    if "outputs" not in record:
        return f"NO: {cell(reason(record['error']))}"
    wrong = f"outputs {record['outputs']:.0e}, gradients {record['gradients']:.0e}"
    why = f" ({KNOWN[record['name']]})" if record["name"] in KNOWN else ""
    return f"NO: {wrong}{', tokens' if record.get('tokens') is False else ''}{why}"


def reason(error: str) -> str:
    """The line of an error with traceback that says what it was."""
    if error.startswith("RankTimeout"):
        return "no result in time"
    lines = [line for line in error.splitlines() if re.match(r"[\w.]*(Error|Exception|Break): ", line)]
    return (lines or error.splitlines())[-1]


def title(task: str) -> str:
    """The name of a task."""
    return task.replace("_", " ").capitalize()


def cell(text: str, length: int = 160) -> str:
    """Text for a table."""
    return text.replace("|", "/").replace("\n", " ")[:length]


def made_by(records: dict[int, list[Record]]) -> str:
    """What the results were made with: versions and commit; where they differ, how many results are of which."""
    found: dict[str, list[Record]] = {}
    for record in (r for several in records.values() for r in several):
        found.setdefault(record.get("versions", versions()), []).append(record)
    commits = {each: list(dict.fromkeys(r["commit"] for r in rows)) for each, rows in found.items()}
    if len(found) == 1 and all(len(each) == 1 for each in commits.values()):
        ((each, (commit,)),) = commits.items()
        return f"{each}, commit {commit}."
    return " ".join(
        f"{each}: {len(rows)} results, of commit {', '.join(commits[each])}." for each, rows in found.items()
    )
