"""The documentation says what the code does: generated pages are current, every strategy has its page, links lead
somewhere.
"""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
from report_builders import make_recommendation

from steptune.tuner.export import EXPORTERS
from steptune.tuner.export.study_formats import STUDY_FORMATS
from steptune.tuner.strategies import STRATEGIES, Strategy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = DOCS / "strategies"
PLANNED = "Planned: not available in this version."
TEXTS = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists())]
)


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def catalogue() -> dict[str, str]:
    """The status of every strategy in the catalogue, by name."""
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \|.*\| (\w+) \|$", (PAGES / "README.md").read_text(), re.MULTILINE)
    assert all(name == page for name, page, _ in rows)
    return {name: status for name, _, status in rows}


# --- docstrings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [("Of a step.", True), ("Whether it is.", True), ("What, then", True), ("Offer of a worker.", False)],
)
def test_a_docstring_that_goes_on_from_its_name_is_found(text, found):
    assert runpy.run_path(str(DOCS / "docstrings.py"))["dependent"](text) is found


def test_product_docstrings_do_not_begin_with_a_clause_either():
    script = runpy.run_path(str(DOCS / "docstrings.py"))
    text = "Where a step begins."
    assert script["dependent"](text, script["BEGINNINGS"] + script["CLAUSES"])
    assert not script["dependent"](text)


# --- generated pages --------------------------------------------------------------------------


@pytest.mark.parametrize("page", generator.PAGES)
def test_a_generated_page_is_what_the_code_says(page):
    """`python docs/generate.py` writes it anew."""
    assert (DOCS / page).read_text() == generator.written(page)


def test_check_fails_on_a_stale_page_and_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    with pytest.raises(SystemExit, match="0"):
        generator.main()
    edited = tmp_path / "reference" / "settings.md"
    edited.write_text(edited.read_text() + "more\n")
    capsys.readouterr()

    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit, match="1"):
        generator.main()

    assert capsys.readouterr().out.splitlines() == [
        "docs/reference/settings.md is stale: run `python docs/generate.py`"
    ]
    assert edited.read_text().endswith("more\n")


def test_check_passes_where_every_page_is_current(tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    for arguments in (["generate.py"], ["generate.py", "--check"]):
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="0"):
            generator.main()


def test_a_rule_without_a_source_for_its_thresholds_is_an_error(monkeypatch):
    """Entries that stand in the generator by hand cannot be forgotten."""
    monkeypatch.delitem(generator.THRESHOLD_SOURCES, "optimizer")
    with pytest.raises(AssertionError, match="optimizer"):
        generator.diagnosis()


# --- pages of strategies ----------------------------------------------------------------------


def test_the_catalogue_calls_available_exactly_what_is_built():
    available = {name for name, status in catalogue().items() if status == "available"}
    assert available == {strategy.name for strategy in STRATEGIES}
    assert set(catalogue().values()) <= {"available", "planned"}


def test_catalogue_and_pages_are_the_same_set():
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == set(catalogue())


@pytest.mark.parametrize("name", catalogue())
def test_a_page_says_whether_its_strategy_is_available(name):
    text = (PAGES / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert (PLANNED in text) == (catalogue()[name] == "planned")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_page_names_every_parameter_with_all_its_values(strategy: Strategy):
    """Ranges by their two ends."""
    rows = {
        cells[0].strip(" `"): cells[1]
        for line in (PAGES / f"{strategy.name}.md").read_text().splitlines()
        if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 3
    }
    for parameter, allowed in strategy.values.items():
        ends = [end for value in allowed for end in ((value[0], value[-1]) if isinstance(value, range) else (value,))]
        missing = [end for end in ends if not re.search(rf"(?<![\w-]){re.escape(str(end))}(?![\w-])", rows[parameter])]
        assert not missing, f"{parameter} lacks {missing}"


# --- links ------------------------------------------------------------------------------------


def prose(path: Path) -> str:
    """A text without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Those that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


def links(path: Path) -> list[str]:
    """Relative ones, of links and pictures."""
    found = re.findall(r"\]\(([^)\s]+)", prose(path)) + re.findall(r'(?:src|href)="([^"]+)"', prose(path))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    broken = []
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda e: e.name)
def test_every_export_is_on_its_page_with_its_version(exporter):
    version = "this" if exporter.version.startswith("steptune") else exporter.version
    page = (DOCS / "exports.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith(f"| `{exporter.name}` |")]
    assert len(rows) == 1
    assert f"| {version} |" in rows[0]
    assert f"`{exporter.file_name(make_recommendation())}`" in rows[0]


@pytest.mark.parametrize("known", STUDY_FORMATS, ids=lambda known: known.name)
def test_every_format_of_a_study_is_on_the_page_of_exports(known):
    assert f"| `{known.name}` | `{known.file_name}` |" in (DOCS / "exports.md").read_text()
