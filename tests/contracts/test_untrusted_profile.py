"""A profile that cannot be trusted gives no verdict: on no page, terminal, report or message, and to no search."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from html import unescape

import httpx
import pytest
from builders import sample_facts
from msgspec.structs import replace
from page_builders import Shown, put, shown, told
from profiled import situation
from report_builders import complete_study
from rich.console import Console
from search_builders import SMALL, searched

from steptune.service.cli.main import main
from steptune.service.cli.trace_summary import print_analysis
from steptune.service.profiling import WorkloadProfile, print_profile
from steptune.tuner.export import EXPORTERS
from steptune.tuner.profiling.diagnosis import diagnose
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.records import SampleUnit, Trial
from steptune.tuner.trace_records import RankAnalysis, TraceAnalysis

PROBLEM = "the first step took 40 times as long as the others"
VERDICTS = re.compile(
    r"limited by|could gain|could save at most|input-bound|stands out|unusually large|% of the change|"
    r"gain: (?:at most|between)|waits? for data|keeps up|straggler",
    re.IGNORECASE,
)
"""Words of what a profile shows."""


def distrusted(trial: Trial) -> Trial:
    if trial.result is None:
        return trial
    bad = tuple(
        replace(b, quality=replace(b.quality, problems=(PROBLEM,), problem_names=("warm_up",)))
        for b in trial.result.breakdowns
    )
    findings = diagnose(Evidence(situation=situation(bad[0]))) if bad else ()
    return replace(trial, result=replace(trial.result, breakdowns=bad, findings=findings))


@pytest.fixture(params=["as it is made", "by a version that kept the shares"])
def site(request, tmp_path) -> Iterator[Shown]:
    study, trials, decisions, answer = told(complete_study())
    study = replace(study, facts=replace(sample_facts(), units_per_batch=32.0))
    assert answer is not None
    shares = {} if request.param == "as it is made" else answer.shares_before
    answer = replace(
        answer, bottleneck_before="unknown", bottleneck_after="unknown", shares_before=shares, shares_after=shares
    )
    answer = replace(answer, certificate=replace(answer.certificate, not_tried=()))
    answer = replace(answer, parts=tuple(replace(part, reason="tried") for part in answer.parts))
    decisions = [replace(d, reason="tried", predicted_bound=None) for d in decisions]
    with shown(tmp_path) as found:
        story = study, [distrusted(t) for t in trials], decisions, answer
        found.studies["bad"], found.trials["bad"] = put(found.store, story)
        yield found


def profiled_ids(site: Shown) -> list[str]:
    trials = site.store.trials(site.studies["bad"])
    return [t.trial_id for t in trials if t.result is not None and t.result.breakdowns]


def visible(html: str) -> str:
    html = re.sub(r"<(script|style|title)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_no_page_gives_one(site):
    study_id = site.studies["bad"]
    before, after = profiled_ids(site)[0], profiled_ids(site)[-1]
    paths = {
        "study": f"/studies/{study_id}",
        "report": f"/studies/{study_id}/report.html",
        "trial": f"/trials/{before}",
        "comparison": f"/compare?a={before}&b={after}",
        "studies": "/",
        "fleet": "/fleet",
    }
    for name, path in paths.items():
        text = visible(httpx.get(site.url + path, timeout=30).text)
        if name == "fleet":
            text = re.sub("(?i)limited by", "", text)  # heads of columns
            assert "unknown" in text
        assert not VERDICTS.search(text), (name, VERDICTS.search(text))
        if name in ("study", "report", "trial", "comparison"):
            assert "cannot be trusted" in text, name
        if name in ("study", "report"):
            assert "Milliseconds per step" not in text, name


def test_no_command_gives_one(site, monkeypatch, capfd):
    study_id = site.studies["bad"]
    trials = {t.trial_id: t.sequence for t in site.store.trials(study_id)}
    sides = [f"{study_id}:{trials[i]}" for i in (profiled_ids(site)[0], profiled_ids(site)[-1])]
    for arguments in (("show", study_id), ("show", study_id, "--all"), ("list",), ("compare", *sides)):
        monkeypatch.setattr(sys, "argv", ["steptune", *arguments, "--database", str(site.store.engine.url)])
        capfd.readouterr()
        with pytest.raises(SystemExit):
            main()
        out = capfd.readouterr().out
        assert not VERDICTS.search(out), (arguments, out)
        if "--all" in arguments:
            assert "step breakdown" not in out
        if "compare" in arguments:
            assert "cannot be trusted" in out


def test_messages_and_exports_say_why(site):
    api, study_id = f"{site.url}/api/v1", site.studies["bad"]
    breakdown = httpx.get(f"{api}/trials/{profiled_ids(site)[0]}/breakdown").json()
    assert [PROBLEM in problem for problem in breakdown["problems"]] == [True]
    findings = httpx.get(f"{api}/studies/{study_id}/findings").json()["items"]
    assert {finding["finding"]["rule"] for finding in findings} == {"bad_capture"}
    recommendation = site.store.recommendation(study_id)
    assert recommendation is not None
    for exporter in EXPORTERS:
        if exporter.refusal(recommendation) is None and exporter.name not in ("json", "yaml"):
            assert not VERDICTS.search(exporter.export(recommendation)), exporter.name


def test_neither_profile_nor_analyze_gives_one(site):
    [trial, *_] = [site.store.trial(i) for i in profiled_ids(site)[:1]]
    result = trial.result
    assert result is not None
    profile = WorkloadProfile(
        workload="w",
        hardware="h",
        units_per_s=1.0,
        sample_unit=SampleUnit.SAMPLE,
        step_time_ns=1e6,
        bottleneck="unknown",
        breakdowns=result.breakdowns,
        findings=result.findings,
        already_on=(),
    )
    rank = RankAnalysis(
        file="",
        rank=0,
        num_ranks=1,
        framing="",
        num_events=1,
        num_lost=0,
        device_names={},
        breakdowns=result.breakdowns,
    )
    analysis = TraceAnalysis(ranks=(rank,), findings=result.findings)
    for show, what in ((print_profile, (profile,)), (print_analysis, (analysis, 5))):
        out = io.StringIO()
        show(Console(file=out, width=200), *what)
        words = re.sub(r"waiting for data|data wait", "", out.getvalue())  # the name of the category
        assert "cannot be trusted" in words
        assert not VERDICTS.search(words), words


def test_a_search_expects_nothing_of_it():
    designer = searched(SMALL, seed=0, trials=12, noise_sd=0.005)
    knowledge, reference = designer.knowledge, designer.reference
    known = knowledge.own_situation(reference)
    assert known is not None
    [result, *_] = [r for r in designer.baseline_results() if r.breakdowns]
    bad = distrusted(
        Trial(
            trial_id=result.trial_id,
            study_id="s",
            sequence=1,
            candidate=reference,
            purpose=result.purpose,
            group=result.group,
            replicate=0,
            state="completed",
            started_at="",
            result=result,
        )
    ).result
    assert bad is not None
    knowledge.take_in_beside(bad)
    assert knowledge.own_situation(reference) is known, "the last profile that can be trusted counts"
