"""The pages of the documentation, and the commands that they show.

A command stands in a fenced block `sh`; what it prints may stand behind it in a fenced block
`text`, where `...` is anything. A comment on the line above the fence says what is special:

    <!-- not run: network -->    shown and not run in tests, with one of the reasons below
    <!-- ends with: 3 -->        the exit code of its last command, where that is not 0"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "examples/own_drafter/README.md",
    "examples/eagle1/README.md",
    "examples/draft_lengths/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
    "docs/certificates/README.md",
)
REASONS = {
    "install": "makes an environment, or changes the one that it is run in",
    "network": "fetches something",
    "minutes": "takes minutes",
    "checkout": "runs in a checkout of the repository, with its tools and tests",
    "other test": "runs in a test of its own",
    "models": "needs models or a device that only the reader has",
}
BLOCK = re.compile(
    r"^(?:<!-- (?P<kind>not run|ends with): (?P<what>[\w ]+) -->\n)?"
    r"```sh\n(?P<commands>.*?)^```\n"
    r"(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """Commands that stand together, and what they print if the page says; line: where, from 1."""

    line: int
    commands: str
    code: int
    skipped: str
    shown: str


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    text, blocks = text_of(page), []
    for found in BLOCK.finditer(text):
        kind, what = found["kind"], found["what"]
        code = int(what) if kind == "ends with" else 0
        skipped = what if kind == "not run" else ""
        line = text.count("\n", 0, found.start("commands")) + 1
        blocks.append(Block(line, found["commands"], code, skipped, found["shown"] or ""))
    return blocks


def not_run(page: str) -> dict[str, int]:
    return dict(Counter(block.skipped for block in blocks_of(page) if block.skipped))
