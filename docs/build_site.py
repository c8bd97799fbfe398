"""Builds the documentation as a site with search, in `build/site`, without a network.

    make site         # makes an environment with the extra `docs` first

README is its first page, CONTRIBUTING and CHANGELOG are pages, and links to other files of the repository lead to where
it is published. A link to a file or heading that does not exist ends the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
PAGES, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages that are not in `docs`, by the name that they have in the site."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


class LinkError(Exception):
    """A link to a file of the repository leads nowhere; those inside of the site are checked by its generator."""


def main() -> None:
    config = ROOT / "zensical.toml"
    repository = tomllib.loads(config.read_text())["project"]["extra"]["repository"]
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    problems: list[str] = []
    for source in [*sorted((ROOT / "docs").rglob("*")), *(ROOT / name for name in OUTSIDE)]:
        if not source.is_file() or source.suffix == ".py":
            continue
        target = PAGES / placed(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(rewritten(source, repository, problems))
        else:
            shutil.copyfile(source, target)
    if problems:
        raise LinkError("links lead nowhere:\n" + "\n".join(problems))
    subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict", "--config-file", config], cwd=ROOT, check=True
    )


def placed(source: Path) -> Path:
    """The place of a page in the site."""
    name = str(source.relative_to(ROOT))
    return Path(OUTSIDE[name]) if name in OUTSIDE else source.relative_to(ROOT / "docs")


def rewritten(source: Path, repository: str, problems: list[str]) -> str:
    """The text of a page with its links as they are in the site."""

    def link(found: re.Match[str]) -> str:
        address = found[2]
        path, mark, anchor = address.partition("#")
        if not path or urlsplit(address).scheme:
            return found[0]
        target = (source.parent / path).resolve()
        if not target.exists():
            problems.append(f"{source.relative_to(ROOT)}: {address}")
            return found[0]
        name = str(target.relative_to(ROOT))
        in_docs = target.is_relative_to(ROOT / "docs") and target.is_file() and target.suffix != ".py"
        if name not in OUTSIDE and not in_docs:
            return f"{found[1]}{repository}/blob/main/{name}{mark}{anchor}{found[3]}"
        up = "../" * (len(placed(source).parts) - 1)
        return f"{found[1]}{up}{placed(target)}{mark}{anchor}{found[3]}"

    return LINK.sub(link, source.read_text())


if __name__ == "__main__":
    main()
