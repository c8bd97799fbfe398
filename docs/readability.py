"""The school years (Flesch-Kincaid) that the first pages ask of a reader: at most 9.

python docs/readability.py       each page with its grade; status 1 where one is above the limit
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import textstat

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/tutorial.md")
MOST = 9.0


def prose(page: str) -> str:
    """The sentences of a page, without code, tables, headings and rows of links. A name of code is a short word."""
    page = re.sub(r"<!--.*?-->|^```.*?^```\s*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", page)
    return " ".join(filter(None, map(_sentences, re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", page))))


def _sentences(block: str) -> str:
    block = " ".join(block.split())
    if block.startswith(("#", "|", "<")) or " · " in block:
        return ""
    block = re.sub(r"^(?:[-*]|\d+\.)\s+|\*+", "", block)
    block = re.sub(r"`[^`]*`", "it", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)).rstrip(":;")
    return block if not block or block.endswith((".", "!", "?")) else f"{block}."


def main() -> None:
    grades = {page: textstat.flesch_kincaid_grade(prose((ROOT / page).read_text(encoding="utf-8"))) for page in PAGES}
    sys.stdout.writelines(f"{page}: grade {grade:.1f}, at most {MOST:g}\n" for page, grade in grades.items())
    sys.exit(any(grade > MOST for grade in grades.values()))


if __name__ == "__main__":
    main()
