"""The README, its blocks, and the folder that holds it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def blocks(language: str) -> list[tuple[str, str]]:
    """Heading above and text of every fenced block in ``language``."""
    found = []
    heading, lines, inside = "", [], False
    for line in README.read_text().splitlines():
        if inside and line == "```":
            found.append((heading, "\n".join(lines)))
            inside = False
        elif inside:
            lines.append(line)
        elif line == f"```{language}":
            inside, lines = True, []
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    return found
