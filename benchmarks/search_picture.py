"""Draws one search by the Gaussian model, for docs/search.md.

    python benchmarks/search_picture.py

Replays a search on a generated surface and writes what the model expected of every start before it, what the start
showed, and the answer after it to docs/images/search_story.svg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from search_surfaces import FAMILIES, Surface, SurfaceRunner, SurfaceSpace, draw_surface

from steptune.tuner.estimates import log_rate
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.model_search import ModelSearch
from steptune.tuner.trials.fake import BATCH

OUT = Path(__file__).parents[1] / "docs" / "images" / "search_story.svg"
FAMILY, NUMBER, SEED, STARTS = "launch-bound", 0, 0, 16
WIDTH, HEIGHT, LEFT, BOTTOM = 860, 380, 60, 310
LOWEST, HIGHEST = 0.9, 1.7
LEGEND = (
    "Starts of one search. Bars: the step that the model expected, two standard deviations either way. Dots: the step",
    "that was measured; crosses: failed. Line: the true step of the answer so far. All over the best of the surface.",
)
BLUE, RED, GREY = "#2a6fb0", "#c0392b", "#666"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start, in steps over the best of the surface.

    Attributes:
        low, high: Two standard deviations about what was expected; None of the first start.
        seen: None where it failed.
        answer: True step of the answer after it.
    """

    low: float | None
    high: float | None
    seen: float | None
    answer: float


def main() -> None:
    surface = draw_surface(next(family for family in FAMILIES if family.name == FAMILY), NUMBER)
    OUT.write_text(as_svg(story(surface)))


def story(surface: Surface) -> list[Start]:
    space = SurfaceSpace(surface, np.random.default_rng(SEED).permutation(len(surface.knobs)))
    runner, best = SurfaceRunner(surface, SEED), surface.best_ms
    designer = Designer(space, search=ModelSearch(), budget_s=1e9, max_trials=STARTS, seed=SEED)
    found = []
    while (suggestion := designer.suggest()) is not None:
        low = high = None
        if found:
            incumbent = designer.history.model.believe(np.array([designer.grid.levels_of(designer.incumbent)]))
            gain = designer.difference(suggestion.candidate, designer.incumbent)
            expected = float(incumbent.mean[0]) - gain.mean
            low, high = (math.exp(expected + side * gain.sd) * BATCH * 1e3 / best for side in (-2, 2))
        result = runner.run(suggestion.candidate, suggestion.purpose, profiled=suggestion.replicate == 0)
        designer.update(Outcome(result=result))
        seen = math.exp(-log_rate(result).mean) * BATCH * 1e3 / best if result.ok else None
        found.append(Start(low=low, high=high, seen=seen, answer=surface.step_ms(designer.incumbent) / best))
    return found


def as_svg(starts: list[Start]) -> str:
    """Bars: what was expected; dots: what was seen; the line: the answer."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(9, 18, 2):
        y = _y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{tenth / 10:.1f}</text>')
    points = " ".join(f"{_x(n, starts):.1f},{_y(start.answer):.1f}" for n, start in enumerate(starts))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
    for n, start in enumerate(starts):
        parts += _marks(_x(n, starts), n, start)
    for row, line in enumerate(LEGEND):
        parts.append(f'<text x="{LEFT}" y="{BOTTOM + 40 + 17 * row}" fill="{GREY}">{line}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _marks(x: float, number: int, start: Start) -> list[str]:
    marks = [f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="{GREY}">{number + 1}</text>']
    if start.low is not None and start.high is not None:
        y1, y2 = _y(start.low), _y(start.high)
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{BLUE}" stroke-width="8" '
            'stroke-opacity="0.25"/>'
        )
    if start.seen is None:
        y = _y(HIGHEST)
        marks.append(f'<text x="{x:.1f}" y="{y + 12:.1f}" text-anchor="middle" fill="{RED}">×</text>')
    else:
        marks.append(f'<circle cx="{x:.1f}" cy="{_y(start.seen):.1f}" r="4" fill="{RED}"/>')
    return marks


def _x(number: int, starts: list[Start]) -> float:
    return LEFT + 25 + number * (WIDTH - LEFT - 70) / max(1, len(starts) - 1)


def _y(ratio: float) -> float:
    inside = min(HIGHEST, max(LOWEST, ratio))
    return BOTTOM - (inside - LOWEST) / (HIGHEST - LOWEST) * (BOTTOM - 20)


if __name__ == "__main__":
    main()
