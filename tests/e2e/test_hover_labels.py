"""Labels of points under the pointer can be read: in light and dark, on every page that has charts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from analysed import write_loop
from msgspec.structs import replace
from page_builders import ranks_story, shown
from readable import contrast
from test_pages_in_browser import browser, complete, visit
from test_trial_pages import Profiled

from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.trace_records import MemoryClass

__all__ = ["browser", "complete", "visit"]  # fixtures
pytestmark = pytest.mark.xdist_group("browser")

CAPTURES = Path(__file__).parents[1] / "captures"
READABLE = 4.5
"""WCAG 2.2, contrast of text (AA)."""
LABELS = """
async () => {
  const frame = () => new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  const colour = element => {
    if (!element) return null;
    const style = getComputedStyle(element);
    return {fill: style.fill, opacity: Number(style.fillOpacity) * Number(style.opacity)};
  };
  const found = [];
  for (const figure of document.querySelectorAll(".figure")) {
    const plot = figure.querySelector(".plot"), name = figure.dataset.figure;
    if (!plot._fullData) continue;
    for (const trace of plot._fullData) {
      if (trace.hoverinfo === "skip" || trace.visible !== true) continue;
      plot.querySelectorAll(".hoverlayer > *").forEach(element => element.remove());
      if (["treemap", "icicle"].includes(trace.type)) {
        const slices = [...plot.querySelectorAll("g.slice")];
        slices[slices.length - 1].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
      } else if (trace.type === "heatmap") {
        const row = trace.z.findIndex(values => values.some(value => value !== null));
        const column = trace.z[row].findIndex(value => value !== null);
        const {xaxis, yaxis} = plot._fullLayout;
        Plotly.Fx.hover(plot, {xpx: xaxis.c2p(column), ypx: yaxis.c2p(row)}, "xy");
      } else {
        const known = point => point.x !== undefined && point.y !== undefined;
        const place = Math.max(0, plot.calcdata[trace.index].findIndex(known));
        Plotly.Fx.hover(plot, [{curveNumber: trace.index, pointNumber: place}]);
      }
      for (let wait = 0; wait < 60 && !plot.querySelector(".hovertext"); wait += 1) await frame();
      const labels = [...plot.querySelectorAll(".hovertext")].map(label => ({
        text: label.textContent,
        parts: [...label.querySelectorAll("text.nums, text.nums tspan")].map(colour),
        names: [...label.querySelectorAll("text.name, text.name tspan")].filter(t => t.textContent).map(colour),
        box: colour(label.querySelector("path")),
        nameBox: colour(label.querySelector("rect")),
      }));
      found.push({figure: name, type: trace.type, trace: trace.name, labels});
    }
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Iterator[Profiled]:
    folder = tmp_path_factory.mktemp("hovered")
    with shown(folder) as service:
        yield Profiled(service, folder)


@pytest.fixture(scope="module")
def trace_page(tmp_path_factory) -> str:
    """A trace's page as a file, as `steptune analyze --html` writes it."""
    files = [write_loop(tmp_path_factory.mktemp("trace") / f"rank{rank}.json", rank=rank) for rank in range(2)]
    page = files[0].with_suffix(".html")
    page.write_text(render_trace_page(analyse_traces(files)), encoding="utf-8")
    return page.as_uri()


@pytest.fixture(scope="module")
def detailed_page(tmp_path_factory) -> str:
    """The page of a capture with stacks and shapes, whose memory is told by class."""
    analysis = analyse_traces([CAPTURES / "h100_detailed.json.gz"], top=60)
    (rank,) = analysis.ranks
    known = rank.memory[-1]
    names, held = ("parameters", "gradients", "activations"), (3 << 20, 2 << 20, 1 << 20)
    classes = tuple(MemoryClass(name=n, peak_bytes=b, at_peak_bytes=b) for n, b in zip(names, held, strict=True))
    history = tuple((moment, *held) for moment, *_ in known.timeline)
    memory = (*rank.memory[:-1], replace(known, classes=classes, class_timeline=history))
    page = tmp_path_factory.mktemp("detailed") / "trace.html"
    page.write_text(render_trace_page(replace(analysis, ranks=(replace(rank, memory=memory),))), encoding="utf-8")
    return page.as_uri()


def unreadable(labels: list[dict]) -> list[str]:
    """Problems of the labels of a page's charts, each with its chart."""
    problems = []
    for found in labels:
        place = f"{found['figure']} ({found['type']}, {found['trace']})"
        if not found["labels"]:
            problems.append(f"{place}: no label under the pointer")
        for label in found["labels"]:
            for parts, box in ((label["parts"], label["box"]), (label["names"], label["nameBox"])):
                for part in parts:
                    ratio = contrast(part["fill"], box["fill"])
                    if ratio < READABLE or part["opacity"] < 1 or box["opacity"] < 1:
                        problems.append(f"{place}: {part} on {box} has a contrast of {ratio:.2f}: {label['text']}")
    return problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
class TestHoverLabels:
    def test_of_a_study(self, complete, visit, scheme):
        names = self._read(visit, scheme, f"{complete.url}/studies/{complete.studies['large']}")
        assert {"breakdown", "history", "gains", "convergence", "memory", "importance"} <= names

    def test_of_a_small_study(self, complete, visit, scheme):
        assert "neighbours" in self._read(visit, scheme, f"{complete.url}/studies/{complete.studies['complete']}")

    def test_of_a_trial(self, profiled, visit, scheme):
        assert {"treemap", "windows", "guard"} <= self._read(visit, scheme, profiled.url)

    def test_of_a_comparison(self, complete, visit, scheme):
        assert self._read(visit, scheme, f"{complete.url}/compare?a={complete.studies['complete']}")

    def test_of_a_prediction(self, complete, visit, scheme):
        study_id = complete.studies.get("ranks") or complete.add("ranks", ranks_story())
        names = self._read(visit, scheme, f"{complete.url}/studies/{study_id}/scaling")
        assert {"step_times", "throughput", "efficiency"} <= names

    def test_of_the_fleet(self, complete, visit, scheme):
        assert {"limits", "strategies"} <= self._read(visit, scheme, f"{complete.url}/fleet")

    def test_of_a_trace(self, trace_page, visit, scheme):
        assert {"steps", "treemap"} <= self._read(visit, scheme, trace_page)

    def test_of_a_trace_with_stacks_and_classes_of_memory(self, detailed_page, visit, scheme):
        assert {"by_module", "by_stack", "treemap", "memory-1"} <= self._read(visit, scheme, detailed_page)
        for words in ("What if", "Modules", "Roofline", "activations"):
            assert visit.page.get_by_text(words).first.is_visible(), words

    def _read(self, visit, scheme: str, url: str) -> set[str]:
        """The names of the charts whose labels were read."""
        visit.page.emulate_media(color_scheme=scheme)
        if url.startswith("file:"):
            visit.page.goto(url)
            visit.page.wait_for_selector("html[data-ready=yes]")
        else:
            visit.go(url)
        visit.page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        visit.draw_all()
        labels = visit.page.evaluate(LABELS)
        assert unreadable(labels) == []
        return {found["figure"] for found in labels}
