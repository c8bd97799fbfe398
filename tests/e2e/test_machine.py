"""Commands that describe a machine and a workload before anything is tuned."""

import gzip
import io
import json
import re

import msgspec
from command import PATIENT, TUNED
from packaging.version import Version
from profiled import breakdown_of, situation
from rich.console import Console

from steptune.service.database import known_revisions
from steptune.service.profiling import WorkloadProfile, print_profile
from steptune.tuner.costs.categories import Category
from steptune.tuner.profiling.diagnosis import diagnose
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.records import SampleUnit
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.workloads.zoo import ZOO


def test_a_profile_says_where_the_step_goes_and_what_could_be_done(steptune):
    found = steptune("profile", TUNED, "--trace", "trace.json.gz", "--json", *PATIENT).json
    untrusted = any(breakdown["quality"]["problems"] for breakdown in found["breakdowns"])
    assert found["bottleneck"] == ("unknown" if untrusted else "input")
    for breakdown in found["breakdowns"]:
        assert sum(breakdown["categories"].values()) == breakdown["step_time_ns"]
    with gzip.open(steptune.folder / "trace.json.gz", "rt") as file:
        assert json.load(file)["traceEvents"]

    console = Console(file=io.StringIO(), width=80)
    print_profile(console, msgspec.convert(found, WorkloadProfile))
    text = console.file.getvalue()
    trust, verdict, *_ = text.splitlines()
    if untrusted:  # on a busy machine
        assert not trust.startswith("profile good: ")
        return
    assert trust.startswith("profile good: ")
    assert re.match(r"[\d.]+ ms a step, [\d.]+ samples/s; limited by input, on ", verdict)
    assert re.search(r"^waiting for data +[\d.]+ ms +\d+ % +█", text, re.MULTILINE)
    assert "data_loading" in text
    assert "gain: at most" in " ".join(text.split()), "wherever the line ends"
    assert all(len(line) <= 80 for line in text.splitlines())


def test_an_untrusted_profile_says_so_first_and_gives_no_verdict():
    breakdown = breakdown_of({Category.DATA_WAIT: 0.9}, problems=("the profiler made the step 4.00 times as long",))
    profile = WorkloadProfile(
        workload="zoo:mlp",
        hardware="a CPU",
        units_per_s=1.0,
        sample_unit=SampleUnit.SAMPLE,
        step_time_ns=1e6,
        bottleneck="unknown",
        breakdowns=(breakdown,),
        findings=diagnose(Evidence(situation=situation(breakdown))),
    )
    console = Console(file=io.StringIO(), width=80)
    print_profile(console, profile)
    text = " ".join(console.file.getvalue().split())
    assert text.startswith(
        "the profile cannot be trusted: the profiler made the step 4.00 times as long 1.00 ms a step"
    )
    assert "no verdict" in text
    assert "limited by" not in text
    assert "at most" not in text
    assert "with_stack" not in text, "Steptune recorded it"


def test_strategies_are_listed_with_what_is_unsupported_and_why(inside):
    listed = inside("strategies", "--device", "cpu").out
    assert all(len(line) <= 80 for line in listed.splitlines())
    for strategy in STRATEGIES:
        assert re.search(rf"^{strategy.name}  ", listed, re.MULTILINE)
    assert re.search("not available here, requires a CUDA device: .*cudnn_benchmark=on", listed)


def test_strategies_are_judged_for_a_workload(steptune):
    rows = {row["name"]: row for row in steptune("strategies", "--workload", TUNED, "--json").json}
    assert list(rows) == [strategy.name for strategy in STRATEGIES]
    [layout] = rows["memory_format"]["unsupported"]
    assert layout["choice"] == {"layout": "channels_last"}
    assert "Conv2d" in layout["reason"]
    assert rows["data_loading"]["neutral"]["num_workers"] == 0
    assert {"num_workers": 2, "persistent_workers": True} in [c["choice"] for c in rows["data_loading"]["choices"]]


def test_the_zoo_names_its_workloads_and_what_must_be_installed(inside):
    rows = inside("zoo", "--json").json
    assert [row["reference"] for row in rows] == [f"zoo:{entry.name}" for entry in ZOO]
    listed = inside("zoo").out
    for row in rows:
        assert re.search(rf"^{row['reference']} ", listed, re.MULTILINE)
        assert not row["missing"] or f"pip install {' '.join(row['missing'])}" in listed


def test_the_doctor_says_what_the_machine_offers(steptune):
    """Its status is 1 where there is a problem; a busy machine is one too."""
    ended = steptune("doctor", "--json", status=None)
    levels = {finding["subject"]: finding["level"] for finding in ended.json}
    assert {"device", "arithmetic", "versions", "C++ compiler", "cores", "memory", "disk"} <= set(levels)
    assert ended.status == int("problem" in levels.values())


def test_the_doctor_names_a_problem_and_the_way_out(steptune):
    out = steptune("doctor", status=1, variables={"PATH": "/nowhere", "CXX": ""}).out
    assert re.search(r"^!  C\+\+ compiler +none *\n +torch.compile cannot be tried: install g\+\+", out, re.MULTILINE)
    assert all(len(line) <= 80 for line in out.splitlines())


def test_a_database_is_made_by_upgrade_and_is_then_current(inside):
    url = "sqlite:///made.db"
    assert inside("db", "upgrade", "--database", url, "--json").json == {
        "database": url,
        "upgraded": True,
        "from": None,
        "to": known_revisions()[0],
    }
    assert "already has this version's schema" in inside("db", "upgrade", "--database", url).out
    assert inside("list", "--database", url, "--json").json == []


def test_an_empty_list_says_how_to_begin(inside):
    assert "steptune tune" in inside("list").out


def test_help_names_every_command_and_its_program(inside):
    overview = inside("--help").out
    for command in [
        "tune",
        "resume",
        "show",
        "list",
        "export",
        "verify",
        "zoo",
        "strategies",
        "profile",
        "doctor",
        "db",
    ]:
        assert re.search(rf"^│ {command} ", overview, re.MULTILINE)
        assert f"Usage: steptune {command}" in inside(command, "--help").out
    name, _, version = inside("--version").out.strip().partition(" ")
    assert name == "steptune"
    assert Version(version) > Version("0")
