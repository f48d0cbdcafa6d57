"""The README and the docs, and the code blocks and tables on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def code_blocks(page, language):
    """The texts of the code blocks in a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page, language, containing):
    """The commands of the one block that contains a text, as lists of words: without prompt and comments."""
    (block,) = (block for block in code_blocks(page, language) if containing in block)
    lines = block.replace("\\\n", " ").splitlines()
    if language == "sh":
        return [shlex.split(line, comments=True) for line in lines if line.strip()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def table(page, header):
    """The rows of the table with this first line, as lists of cells."""
    lines = page.read_text().split(header, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
