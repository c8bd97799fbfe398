"""One study through terminal, pages, REST, report and exports: one speed, one interval, one verdict, one baseline step.

The trials of the story disagree as those of a busy machine do: single runs show 3.19 and 3.68 times the speed, the
search estimates something between, a starved companion 14.3, and the confirmation 5.84. Its steps restart epochs, which
are most of their time. A script's study is told as a workload's is, and its `verify` names the same claim.
"""

from __future__ import annotations

import io
import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest
from builders import sample_facts
from msgspec.structs import replace
from page_builders import OUT_OF_MEMORY, put, shown
from report_builders import (
    STEP_AFTER,
    STEP_BEFORE,
    WORKERS,
    complete,
    cpu_hardware,
    environment_variables,
    make_recommendation,
    make_result,
    make_study,
    make_trials,
)
from rich.console import Console
from sqlalchemy import update

from steptune.service.cli.main import main
from steptune.service.connections import writing
from steptune.service.models import RecommendationRow
from steptune.service.script_verification import print_script_verification, with_claim
from steptune.tuner.export import exporters_for
from steptune.tuner.records import (
    BASELINE,
    Alternative,
    Candidate,
    Decision,
    Environment,
    Gain,
    Interval,
    Move,
    Numerics,
    Part,
    Purpose,
    ScriptFacts,
    Verdict,
)
from steptune.tuner.scripts.agent.sources import counted_lines, source_digest
from steptune.tuner.scripts.verification import ScriptVerification
from steptune.tuner.speeds import answer_of
from steptune.tuner.strategies.in_scripts import script_changes
from steptune.tuner.strategies.planned import planned_steps
from steptune.tuner.workloads.reference import workload_of

CHANGED = Candidate(choices={"data_loading": WORKERS})
RESTART_MS, WINDOW_MS = 276.0, 75.0
STEP_MS = RESTART_MS + WINDOW_MS
RATIO, LOW, HIGH = 5.84, 4.60, 5.84**2 / 4.60
RATE = 32 / STEP_MS * 1e3
CONFIRMED = Gain(
    ratio=RATIO,
    interval=Interval(low=LOW, high=HIGH),
    prediction=Interval(low=RATIO / 1.5, high=RATIO * 1.5),
    num_blocks=3,
    num_finalists=1,
)
UNPROVEN = replace(
    CONFIRMED, ratio=1.02, interval=Interval(low=0.98, high=1.02**2 / 0.98), prediction=Interval(low=0.97, high=1.07)
)
WIDE = replace(CONFIRMED, interval=Interval(low=1.19, high=28.66), prediction=Interval(low=0.5, high=68.2))
SEARCHED = Interval(low=2.5, high=3.4**2 / 2.5)
FIGURES = re.compile(r"(?<![\d.])(?:\d+(?:\.\d+)?×|\d+\.\d+x\b)")
OF_A_RUN = re.compile(r"this run: (?:<b>)?\d+\.\d+×")
"""Another quantity, and named so."""
SCRIPT = """\
from torch.utils.data import DataLoader


def batches(data):
    return DataLoader(data, batch_size=32, shuffle=True)
"""
COMMAND = ("python", "train.py")


def script_in(folder: Path) -> ScriptFacts:
    """A script in a folder, with the place of its loader."""
    (folder / COMMAND[1]).write_text(SCRIPT)
    return ScriptFacts(
        command=COMMAND,
        folder=str(folder),
        loader="DataLoader",
        loader_number=0,
        places={"loader": f"{folder / COMMAND[1]}:5 in batches"},
        files={COMMAND[1]: source_digest(SCRIPT)},
        lines={"loader": (COMMAND[1], counted_lines(SCRIPT).index(5))},
    )


def story(verdict: Verdict, script: ScriptFacts | None = None):
    """A study that ended with a verdict, of a workload or of a script."""
    search = verdict is not Verdict.NOT_SEARCHED
    before = [
        _run(f"base{n}", BASELINE, WINDOW_MS, purpose=Purpose.BASELINE, breakdown=_scaled(STEP_BEFORE, STEP_MS))
        for n in range(3)
    ]
    tried = [
        _run("a", CHANGED, STEP_MS / 3.19, breakdown=_scaled(STEP_AFTER, STEP_MS / 3.19)),
        _run("b", CHANGED, STEP_MS / 3.68),
    ]
    blocks = [
        _run(f"c{block}{n}", candidate, step_ms, purpose=Purpose.CONFIRM, group=f"block{block}")
        for block in range(3)
        for n, (candidate, step_ms) in enumerate(((BASELINE, WINDOW_MS), (CHANGED, STEP_MS / RATIO)))
    ]
    if verdict is Verdict.ENABLES_TRAINING:
        before = [_run("base0", BASELINE, WINDOW_MS, purpose=Purpose.BASELINE, failure=OUT_OF_MEMORY)]
        tried = [replace(result, purpose=Purpose.BASELINE) for result in tried]
    confirmed = verdict in (Verdict.FASTER, Verdict.NO_SIGNIFICANT_GAIN, Verdict.INCONCLUSIVE)
    trials = make_trials([*before, *(tried if search else []), *(blocks if confirmed else [])])
    searched = search and verdict is not Verdict.ENABLES_TRAINING
    moves = (Move(strategy="data_loading", choice=WORKERS),)
    decisions = [
        Decision(
            sequence=1,
            stage="move",
            verdict="accepted",
            reason="waits for data",
            candidate=CHANGED,
            moves=moves,
            trial_ids=("a", "b"),
            measured_gain=13.34,
            measured_se=0.1,
        ),
        Decision(
            sequence=2,
            stage="confirm",
            verdict="confirmed",
            reason="3 starts",
            candidate=CHANGED,
            measured_gain=RATIO - 1,
        ),
    ]
    study = make_study(facts=replace(sample_facts(), steps_per_epoch=50, units_per_batch=32.0))
    study = replace(study, environment=Environment(hardware=cpu_hardware()))
    recommendation = answer(verdict)
    if script is not None:
        command = workload_of(script.command)
        study = replace(study, workload=command, facts=replace(study.facts, reference=command, script=script))
        changes = script_changes(recommendation.candidate, recommendation.choices, script)
        recommendation = replace(recommendation, workload=command, in_script=changes)
    return study, trials, decisions[: 2 if confirmed else 1] if searched else [], recommendation


def answer(verdict: Verdict):
    changes = verdict not in (Verdict.NO_SIGNIFICANT_GAIN, Verdict.NOT_SEARCHED)
    candidate = CHANGED if changes else BASELINE
    gain = {Verdict.FASTER: CONFIRMED, Verdict.INCONCLUSIVE: WIDE}.get(verdict)
    ratio = gain.ratio if gain else 3.4 if verdict is Verdict.UNCONFIRMED else 1.0
    part = Part(
        strategy="data_loading",
        choice=WORKERS,
        gain=3.03,
        interval=Interval(low=2.0, high=4.6),
        bound=None,
        reason="waits for data",
        numerics=Numerics.EXACT,
    )
    beside = Alternative(
        candidate=CHANGED,
        gain=1.76,
        peak_memory_bytes=1 << 28,
        numerics=Numerics.EXACT,
        guard="same",
        interval=Interval(low=1.2, high=2.6),
        confirmed=UNPROVEN,
    )
    choices = complete(candidate)
    recommendation = make_recommendation(
        candidate,
        verdict=verdict,
        choices=choices,
        environment_variables=environment_variables(choices),
        gain=gain,
        unproven_gain=UNPROVEN if verdict is Verdict.NO_SIGNIFICANT_GAIN else None,
        unproven_candidate=CHANGED if verdict is Verdict.NO_SIGNIFICANT_GAIN else None,
        search_interval=SEARCHED if verdict is Verdict.UNCONFIRMED else None,
        baseline_units_per_s=RATE,
        units_per_s=RATE * ratio,
        parts=(part,) if changes else (),
        alternatives=(beside,) if verdict is Verdict.NO_SIGNIFICANT_GAIN else (),
    )
    certificate = replace(recommendation.certificate, not_tried=())
    return replace(recommendation, certificate=certificate)


def _run(name: str, candidate: Candidate, step_ms: float, **details):
    result = make_result(name, candidate, step_ms * 1e6, seed=len(name), **details)
    if candidate.is_baseline:
        result = replace(result, epoch_restart_ns=round(RESTART_MS * 50 * 1e6), steps_per_epoch=50)
    return result


def _scaled(step: dict[str, int], total_ms: float) -> dict[str, int]:
    factor = total_ms * 1e6 / sum(step.values())
    return {name: round(value * factor) for name, value in step.items()}


def allowed(verdict: Verdict) -> set[str]:
    """Figures that may be said of the only configuration, with as many digits as figures have."""
    gains = {Verdict.FASTER: (CONFIRMED,), Verdict.INCONCLUSIVE: (WIDE,), Verdict.NO_SIGNIFICANT_GAIN: (UNPROVEN,)}.get(
        verdict, ()
    )
    values = [v for g in gains for i in (g.interval, g.prediction) for v in (g.ratio, i.low, i.high)]
    if verdict is Verdict.UNCONFIRMED:
        values += [3.4, SEARCHED.low, SEARCHED.high]
    neighbours = [1 / v for v in values if v]
    digits = {f"{v:.3f}" if abs(v - 1) < 0.095 else f"{v:.2f}" for v in (*values, *neighbours, 1.0)}
    return digits | {"1"}


def figures_in(text: str) -> set[str]:
    plain = OF_A_RUN.sub("", unescape(text).replace("\\u00d7", "×").replace("\\u003c", "<").replace("\\u003e", ">"))
    return {found.rstrip("×x") for found in FIGURES.findall(plain)}


class Walk:
    """A study that a service shows and a terminal reads."""

    def __init__(self, site, verdict: Verdict, monkeypatch, capfd, script: ScriptFacts | None = None) -> None:
        self.site, self.verdict, self._monkeypatch, self._capfd = site, verdict, monkeypatch, capfd
        self.script = script
        self.study_id, self.trial_ids = put(site.store, story(verdict, script))
        self.database = str(site.store.engine.url)

    def command(self, *arguments: str) -> str:
        self._capfd.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["steptune", *arguments])
        self._monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        captured = self._capfd.readouterr()
        assert not ended.value.code, captured.err
        return " ".join(captured.out.split())  # wherever lines end

    def terminal(self) -> dict[str, str]:
        own = ("--database", self.database)
        found = {
            "show": self.command("show", self.study_id, *own),
            "show --all": self.command("show", self.study_id, "--all", *own),
            "last": self.command("show", *own),
            "list": self.command("list", *own),
            "studies": self.command("studies", "--url", self.site.url),
            "watch": self.command("watch", self.study_id, "--url", self.site.url),
        }
        if self.verdict in (Verdict.FASTER, Verdict.INCONCLUSIVE, Verdict.UNCONFIRMED):
            sides = f"{self.study_id}:baseline", f"{self.study_id}:recommended"
            found["compare"] = self.command("compare", *sides, *own)
        return found

    def get(self, path: str) -> str:
        import httpx

        answer = httpx.get(f"{self.site.url}{path}", timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.text

    def pages(self) -> dict[str, str]:
        paths = {
            "study": f"/studies/{self.study_id}",
            "studies": "/",
            "fleet": "/fleet",
            **{f"trial {n}": f"/trials/{trial_id}" for n, trial_id in enumerate(self.trial_ids)},
            "compare": f"/compare?a={self.study_id}",
            "report": f"/studies/{self.study_id}/report.html",
        }
        return {name: self.get(path) for name, path in paths.items()}

    def exports(self) -> dict[str, str]:
        recommendation = self.site.store.recommendation(self.study_id)
        found = {e.name: e.export(recommendation) for e in exporters_for(recommendation)}
        if self.script is not None and not recommendation.candidate.is_baseline:
            found["diff"] = self.command("export", self.study_id, "-f", "diff", "-o", "-", "--database", self.database)
        return found

    def verified(self) -> str:
        """The lines of `verify` for a script, whose own run took as long as the study claims."""
        gain = CONFIRMED if self.verdict is Verdict.FASTER else WIDE
        found = ScriptVerification(gain=gain, same=True, reason="", num_losses=9, difference=0.0, tolerance=0.0)
        out = io.StringIO()
        recommendation = self.site.store.recommendation(self.study_id)
        found = with_claim(found, recommendation)
        assert found.claimed == (answer_of(recommendation) if self.verdict is Verdict.FASTER else None)
        print_script_verification(Console(file=out, width=200), found, recommendation)
        return out.getvalue()


VERDICTS_OF_SCRIPTS = (Verdict.FASTER, Verdict.INCONCLUSIVE, Verdict.NO_SIGNIFICANT_GAIN)
OF_WORKLOADS = [pytest.param((v, False), id=v.value) for v in Verdict]
EVERY = [*OF_WORKLOADS, *(pytest.param((v, True), id=f"{v.value}-script") for v in VERDICTS_OF_SCRIPTS)]
FASTER = [pytest.param((Verdict.FASTER, of_script), id=f"faster{'-script' * of_script}") for of_script in (False, True)]


@pytest.fixture(params=EVERY)
def walk(request, tmp_path, monkeypatch, capfd):
    verdict, of_script = request.param
    with shown(tmp_path) as site:
        yield Walk(site, verdict, monkeypatch, capfd, script_in(tmp_path) if of_script else None)


def _without_scripts(html: str) -> str:
    """Text, titles and the data of figures; not the code of pages, which figures of other things may be in."""
    data = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, flags=re.S)
    return re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.S) + "\n".join(data)


def test_every_surface_says_the_same_of_the_only_configuration(walk):
    wanted, words = allowed(walk.verdict), walk.verdict.value.replace("_", " ")
    surfaces = {
        **{f"terminal {name}": text for name, text in walk.terminal().items()},
        **{f"page {name}": _without_scripts(text) for name, text in walk.pages().items()},
        **{f"export {name}": text for name, text in walk.exports().items()},
    }
    if walk.script is not None and walk.verdict is not Verdict.NO_SIGNIFICANT_GAIN:
        surfaces["terminal verify"] = walk.verified()
        claims = re.findall("^(claimed|no claim) ", surfaces["terminal verify"], flags=re.M)
        assert claims == ["claimed" if walk.verdict is Verdict.FASTER else "no claim"]
    wrong = {name: sorted(figures_in(text) - wanted) for name, text in surfaces.items()}
    assert {name: found for name, found in wrong.items() if found} == {}
    if walk.verdict is Verdict.FASTER:
        ratio, interval = f"{RATIO:.2f}×", f"{LOW:.2f}× to {HIGH:.2f}×"
        for name in (
            "terminal show",
            "terminal show --all",
            "terminal list",
            "terminal watch",
            "terminal compare",
            "page study",
            "page compare",
            "page report",
        ):
            assert ratio in unescape(surfaces[name]), name
            assert interval in unescape(surfaces[name]), name
        for name in ("terminal studies", "page studies", "page fleet"):
            assert ratio in unescape(surfaces[name]), name
        code = "export python" if walk.script is None else "export diff"
        assert f"{RATIO:.2f}x" in surfaces[code]
        assert f"{LOW:.2f}x to {HIGH:.2f}x" in surfaces[code]
        if walk.script is not None:
            assert f"claimed    {ratio} ({interval})" in surfaces["terminal verify"]
    else:
        for name in ("terminal list", "terminal studies", "page studies"):
            assert words in unescape(surfaces[name]), name
            assert not figures_in(surfaces[name]), name


@pytest.mark.parametrize("walk", OF_WORKLOADS, indirect=True)
def test_the_plan_of_the_answer_is_on_the_terminal_and_on_the_page(walk):
    steps = planned_steps(walk.site.store.recommendation(walk.study_id).choices)
    shown = walk.command("show", walk.study_id, "--plan", "--database", walk.database)
    page = walk.get(f"/studies/{walk.study_id}")
    assert steps or walk.verdict is not Verdict.FASTER
    for step in steps:
        assert f"{step.stage} {step.does} {step.strategy}" in shown
        assert f"<code>{step.does}</code>" in page


def test_rest_says_what_the_pages_say(walk):
    api = f"/api/v1/studies/{walk.study_id}"
    [listed] = json.loads(walk.get("/api/v1/studies"))["items"]
    study, recommendation = (json.loads(walk.get(path)) for path in (api, f"{api}/recommendation"))
    proven = RATIO if walk.verdict is Verdict.FASTER else None
    for one in (listed, study):
        assert (one["verdict"], one["gain"]) == (walk.verdict.value, proven)
    assert recommendation["verdict"] == walk.verdict.value
    if proven:
        assert (recommendation["gain"]["ratio"], recommendation["gain"]["interval"]["low"]) == (RATIO, LOW)
        assert recommendation["units_per_s"] / recommendation["baseline_units_per_s"] == pytest.approx(RATIO)


@pytest.mark.parametrize("walk", FASTER, indirect=True)
def test_the_baseline_has_one_step_time(walk):
    """Epoch restarts are part of a step, wherever one is told."""
    trials = json.loads(walk.get(f"/api/v1/studies/{walk.study_id}/trials"))["items"]
    steps_ms = [t["step_time_ns"] / 1e6 for t in trials if not t["candidate"]["choices"]]
    pages, terminal = walk.pages(), walk.terminal()
    for text in (pages["study"], pages["report"], pages["compare"], terminal["show --all"], terminal["compare"]):
        told = re.findall(r"35[0-2](?:\.\d+)?(?= ms|</td>)", unescape(text))
        assert told, "the step of today's settings"
    [fact] = re.findall(r"<dt>Step</dt>\s*<dd class=\"value\">([\d.]+) ms</dd>", pages["trial 0"])
    assert [float(fact), *steps_ms] == pytest.approx([STEP_MS] * (1 + len(steps_ms)), rel=0.01)
    columns = walk.get(f"/api/v1/studies/{walk.study_id}/trials?format=csv").splitlines()
    first = dict(zip(columns[0].split(","), columns[1].split(","), strict=True))
    assert float(first["step_time_ns"]) / 1e6 == pytest.approx(steps_ms[0])
    assert float(first["units_per_s"]) == pytest.approx(trials[0]["units_per_s"])


def test_a_gain_that_an_older_version_wrote_beside_another_verdict_is_not_listed(tmp_path, monkeypatch, capfd):
    with shown(tmp_path) as site:
        walk = Walk(site, Verdict.NO_SIGNIFICANT_GAIN, monkeypatch, capfd)
        with writing(site.store.engine) as session:
            session.execute(update(RecommendationRow).values(gain=1.76))
        assert "1.76" not in walk.command("studies", "--url", site.url)
        assert json.loads(walk.get("/api/v1/studies"))["items"][0]["gain"] is None
        assert "1.76" not in walk.get("/")
        assert "1.76" not in walk.get("/fleet")
