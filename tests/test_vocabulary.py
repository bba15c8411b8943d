"""One word for one thing, the field's: private words for known things do not come back.

``python tests/test_vocabulary.py paraxis/weights`` lists what is found below a folder or in a file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WORDS = {
    "whole": "replicated, full, entire",
    "letting_go": "reshard_after_forward",
    "made_up": "dummy, random, fake",
    "imagined": "simulated",
    "turned": "rotated (RoPE); becomes, is replaced by",
    "regather": "unshard",
    "few_rows": "gemv",
    "opened": "falls back, graph break",
    "given": "passed, input, from the caller",
    "kept": "cached, retained, stays",
}
"""The word, and what to say instead. Found inside of snake_case names too; ``_`` stands for a blank as well."""

PLACES = ("paraxis", "tests", "benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = {".py", ".md", ".html", ".cpp", ".h", ".svg", ".toml", ".yml", ".js", ".css"}
GENERATED = ("docs/results/",)

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("tests/test_vocabulary.py", "*"): "names the words",
    ("tests/layers/test_loss_random.py", "given"): "a decorator of hypothesis",
    ("CHANGELOG.md", "whole"): "a deprecated constraint",
    ("paraxis/solver/constraints.py", "whole"): "a deprecated constraint",
    ("tests/solver/test_constraints.py", "whole"): "a deprecated constraint",
    ("paraxis/export/__init__.py", "whole"): "a deprecated attribute",
}
"""(file, word or ``*``): why it may stand there."""

_PATTERN = re.compile(
    r"(?<![A-Za-z])(" + "|".join(word.replace("_", "[_ ]") for word in WORDS) + r")(?![A-Za-z])", re.IGNORECASE
)


def found_in(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, word, line) of every private word in a file that is not excepted."""
    name = path.relative_to(ROOT).as_posix()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in _PATTERN.finditer(line):
            word = match.group(1).lower().replace(" ", "_")
            if (name, word) not in EXCEPTIONS and (name, "*") not in EXCEPTIONS:
                yield number, word, line.strip()


def files(places: tuple[str, ...] = PLACES) -> Iterator[Path]:
    """The files of the project that people read."""
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            if file.is_file() and file.suffix in SUFFIXES and not name.startswith(GENERATED):
                yield file


def test_no_private_words() -> None:
    """Every word for a known thing is the field's."""
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}: say {WORDS[word]}: {line}"
        for path in files()
        for number, word, line in found_in(path)
    ]
    assert not lines, "\n".join(lines)


def test_every_exception_is_needed() -> None:
    """An exception whose word is gone goes too."""
    for name, word in EXCEPTIONS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert word == "*" or re.search(rf"(?<![A-Za-z]){word.replace('_', '[_ ]')}(?![A-Za-z])", text, re.IGNORECASE)


if __name__ == "__main__":
    for file in files(tuple(str(Path(a).resolve().relative_to(ROOT)) for a in sys.argv[1:]) or PLACES):
        for number, word, line in found_in(file):
            print(f"{file.relative_to(ROOT)}:{number}: {word!r}: say {WORDS[word]}: {line}")
