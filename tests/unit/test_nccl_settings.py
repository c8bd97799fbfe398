"""NCCL's settings: what is asked for, how it is read back, and what the user's own environment says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import sample_breakdown, sample_environment, sample_facts
from report_builders import make_recommendation

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.export import python_code
from steptune.tuner.network.choices_log import read_choices
from steptune.tuner.records import Candidate
from steptune.tuner.strategies import STRATEGIES, Supported
from steptune.tuner.strategies.combine import normalise
from steptune.tuner.strategies.nccl_settings.strategy import VARIABLES, NcclSettings, settings_of
from steptune.tuner.training.hosts import HOST_ID, OVER_LOOPBACK
from steptune.tuner.trials.inspection import InspectRequest, with_nccl

NCCL = NcclSettings()
DEFAULTS = NcclSettings.defaults
LOGS = Path(__file__).parents[1] / "nccl_logs"
SOCKETS = {"socket_threads": 4, "sockets_per_thread": 4}
TWO_HOSTS = sample_environment(num_ranks=4, num_hosts=2)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing of NCCL."""
    for variable in ("NCCL_DEBUG_FILE", *VARIABLES.values(), HOST_ID, *OVER_LOOPBACK):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


class TestVariables:
    @pytest.mark.parametrize(
        ("difference", "variables"),
        [
            ({}, {}),
            ({"algorithm": "tree"}, {"NCCL_ALGO": "allreduce:tree"}),
            ({"protocol": "simple"}, {"NCCL_PROTO": "Simple"}),
            ({"protocol": "ll", "algorithm": "own"}, {"NCCL_PROTO": "LL"}),
            ({"min_channels": 16, "max_channels": 32}, {"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "32"}),
            (SOCKETS, {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}),
        ],
    )
    def test_say_what_is_chosen_and_nothing_of_what_is_left(self, difference: Any, variables: dict[str, str]) -> None:
        assert NCCL.environment_variables({**DEFAULTS, **difference}) == variables

    def test_are_read_back_as_the_choice_that_they_were_made_of(self) -> None:
        choices = NCCL.choices(TWO_HOSTS, sample_facts())
        assert len(choices) > 1
        for choice in choices:
            assert settings_of(NCCL.environment_variables(choice)) == choice

    @pytest.mark.parametrize(
        ("variable", "text", "value"),
        [
            ("NCCL_ALGO", "AllReduce:Ring", "ring"),
            ("NCCL_ALGO", "Ring", "own"),  # of every collective, which none of the choices says
            ("NCCL_ALGO", "^Tree", "own"),
            ("NCCL_ALGO", "", None),
            ("NCCL_PROTO", "SIMPLE", "simple"),
            ("NCCL_PROTO", "LL128", "own"),
            ("NCCL_MIN_NCHANNELS", " 8 ", 8),
            ("NCCL_MAX_NCHANNELS", "010", "own"),  # octal for NCCL
            ("NCCL_SOCKET_NTHREADS", "17", "own"),
            ("NCCL_NSOCKS_PERTHREAD", "many", "own"),
        ],
    )
    def test_of_the_user_have_a_value_or_are_their_own(self, variable: str, text: str, value: Any) -> None:
        assert [found for found in settings_of({variable: text}).values() if found is not None] == [value] * (
            value is not None
        )


class TestToday:
    def request(self, device: str = "cuda", num_ranks: int = 2) -> InspectRequest:
        return InspectRequest(workload="", study_directory="", device=device, num_ranks=num_ranks)

    def test_is_what_the_environment_says(self, unset: pytest.MonkeyPatch) -> None:
        unset.setenv("NCCL_MIN_NCHANNELS", "16")
        unset.setenv("NCCL_ALGO", "Ring,Tree")
        current = with_nccl({"precision": {"level": "O1"}}, self.request())
        assert current == {"precision": {"level": "O1"}, "nccl_settings": {"algorithm": "own", "min_channels": 16}}
        today = NCCL.neutral(sample_facts(current=current))
        assert NCCL.environment_variables(today) == {"NCCL_MIN_NCHANNELS": "16"}

    def test_is_what_the_workload_says_where_both_do(self, unset: pytest.MonkeyPatch) -> None:
        unset.setenv("NCCL_MIN_NCHANNELS", "16")
        assert with_nccl({"nccl_settings": {"min_channels": 8}}, self.request()) == {
            "nccl_settings": {"min_channels": 8}
        }

    @pytest.mark.usefixtures("unset")
    def test_is_plain_where_nothing_is_set(self) -> None:
        assert with_nccl({}, self.request()) == {}

    @pytest.mark.parametrize(("device", "num_ranks"), [("cpu", 2), ("cuda", 1)])
    def test_is_plain_without_nccl(self, unset: pytest.MonkeyPatch, device: str, num_ranks: int) -> None:
        """Without NCCL, variables that are set are not read: they would only make every trial start afresh."""
        unset.setenv("NCCL_MIN_NCHANNELS", "16")
        assert with_nccl({}, self.request(device, num_ranks)) == {}

    def test_stays_in_every_choice_that_does_not_replace_it(self) -> None:
        facts = sample_facts(current={"nccl_settings": {"algorithm": "own", "min_channels": 16}})
        choices = NCCL.choices(TWO_HOSTS, facts)
        for choice in choices:
            assert NCCL.supports(choice, TWO_HOSTS, facts) == Supported()
            assert choice["min_channels"] in (16, 32)
            assert choice["algorithm"] in ("own", "ring", "tree")
        assert NCCL.neutral(facts) in choices


class TestSpace:
    def test_sockets_are_tried_between_hosts_only(self) -> None:
        facts, one_host = sample_facts(current={}), sample_environment(num_ranks=4)
        choices = NCCL.choices(TWO_HOSTS, facts)
        assert all(NCCL.supports(choice, TWO_HOSTS, facts) == Supported() for choice in choices)
        left = [choice for choice in choices if NCCL.supports(choice, one_host, facts) == Supported()]
        assert [choice for choice in choices if choice not in left] == [
            {**DEFAULTS, "socket_threads": threads, "sockets_per_thread": each}
            for threads, each in ((4, 4), (8, 4), (2, 2))
        ]

    @pytest.mark.parametrize(("mode", "kept"), [("ddp", True), ("full", False), ("grad_op", False), ("hybrid", True)])
    def test_an_algorithm_of_all_reduces_counts_where_there_are_any(self, mode: str, kept: bool) -> None:
        candidate = Candidate(choices={"sharding": {"mode": mode}, "nccl_settings": {"algorithm": "tree"}})
        found = normalise(candidate, sample_facts(current={})).choices
        assert ("nccl_settings" in found) == kept

    def test_saves_exposed_communication_at_most(self) -> None:
        categories = {Category.COMMUNICATION: 300_000, Category.ELEMENTWISE: 700_000}
        breakdown = sample_breakdown(
            categories=categories, step_time_ns=1_000_000, rescaled={}, unprofiled_step_time_ns=None
        )
        situation = Situation(
            breakdown=breakdown,
            workload=sample_facts(),
            environment=TWO_HOSTS,
            choices={s.name: dict(s.defaults) for s in STRATEGIES},
        )
        assert NCCL.bound(situation, {**DEFAULTS, **SOCKETS}) == pytest.approx(0.3)
        assert NCCL.bound(situation, dict(DEFAULTS)) == 0


class TestEffect:
    def evidence(
        self, device: str, monkeypatch: pytest.MonkeyPatch, log: str | None = None, **variables: str
    ) -> dict[str, Any]:
        """Evidence of a rank whose process has these variables, and whose NCCL wrote that log."""
        if log is not None:
            monkeypatch.setenv("NCCL_DEBUG_FILE", str(LOGS / f"choices_{log}.log"))
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        job: Any = SimpleNamespace(device=torch.device(device))
        return NCCL.evidence(job)

    @pytest.mark.parametrize(
        ("difference", "log", "detail"),
        [
            (SOCKETS, "channels_and_sockets", "4 threads, 4 sockets per thread"),
            ({"min_channels": 16}, "channels_and_sockets", "16 channels"),
            ({"max_channels": 2}, "own", "2 channels"),
            ({"algorithm": "tree"}, "tree", "all-reduces ran with tree"),
            ({"protocol": "ll"}, "ll", "collectives ran with ll"),
            (
                {"algorithm": "ring", "protocol": "simple"},
                "ring_simple",
                "all-reduces ran with ring, collectives ran with simple",
            ),
        ],
    )
    def test_what_nccl_says_that_it_used_took(
        self, difference: dict[str, Any], log: str, detail: str, unset: pytest.MonkeyPatch
    ) -> None:
        choice = {**DEFAULTS, **difference}
        evidence = self.evidence("cuda", unset, log, **NCCL.environment_variables(choice))
        effect = NCCL.took_effect(evidence, choice)
        assert effect.took
        assert effect.detail.startswith(f"NCCL 2.28.9: {detail}")

    @pytest.mark.parametrize("log", [None, "own"])
    @pytest.mark.parametrize(
        "difference",
        [SOCKETS, {"min_channels": 16}, {"algorithm": "tree"}, {"protocol": "ll"}, {"protocol": "simple"}],
        ids=str,
    )
    def test_a_variable_that_is_set_and_not_followed_is_noticed(
        self, difference: dict[str, Any], log: str | None, unset: pytest.MonkeyPatch
    ) -> None:
        """Its log is that of a run without, or none."""
        choice = {**DEFAULTS, **difference}
        evidence = self.evidence("cuda", unset, log, **NCCL.environment_variables(choice))
        assert not NCCL.took_effect(evidence, choice).took

    def test_where_collectives_are_not_logged_what_was_left_to_choose_from_counts(self) -> None:
        """Before NCCL 2.23."""
        lines = (LOGS / "choices_tree.log").read_text().splitlines()
        used = read_choices(line for line in lines if " Bytes -> Algo" not in line)
        assert used.algorithms == ("tree",)
        assert used.protocols == ("ll", "ll128", "simple")

    def test_emulated_hosts_are_told(self, unset: pytest.MonkeyPatch) -> None:
        evidence = self.evidence("cuda", unset, NCCL_HOSTID="steptune-host-1", NCCL_SOCKET_IFNAME="veth0")
        effect = NCCL.took_effect(evidence, dict(DEFAULTS))
        assert effect.took
        assert effect.detail == "NCCL 2.28.9: NCCL_HOSTID=steptune-host-1, NCCL_SOCKET_IFNAME=veth0"

    def test_a_variable_that_the_process_lacks_is_noticed(self, unset: pytest.MonkeyPatch) -> None:
        evidence = self.evidence("cuda", unset, NCCL_SOCKET_NTHREADS="4")
        effect = NCCL.took_effect(evidence, {**DEFAULTS, **SOCKETS})
        assert not effect.took
        assert effect.detail == "sockets_per_thread is None, not 4"

    def test_a_variable_that_nobody_asked_for_is_noticed(self, unset: pytest.MonkeyPatch) -> None:
        assert not NCCL.took_effect(self.evidence("cuda", unset, NCCL_PROTO="LL"), dict(DEFAULTS)).took

    def test_the_users_own_value_took_while_it_is_there(self, unset: pytest.MonkeyPatch) -> None:
        choice = {**DEFAULTS, "algorithm": "own"}
        assert not NCCL.took_effect(self.evidence("cuda", unset), choice).took
        assert NCCL.took_effect(self.evidence("cuda", unset, NCCL_ALGO="^Tree"), choice).took

    def test_without_nccl_there_is_nothing_to_set(self, unset: pytest.MonkeyPatch) -> None:
        """Variables that nobody reads are no evidence."""
        choice = {**DEFAULTS, **SOCKETS}
        evidence = self.evidence("cpu", unset, **NCCL.environment_variables(choice))
        assert NCCL.took_effect(evidence, dict(DEFAULTS)).took
        effect = NCCL.took_effect(evidence, choice)
        assert not effect.took
        assert effect.detail == "the job does not use NCCL"


def test_an_export_says_that_values_of_the_users_own_must_stay_set() -> None:
    recommendation = make_recommendation(Candidate())
    said = python_code.nccl_settings({**DEFAULTS, "algorithm": "own", "min_channels": 16}, recommendation)
    assert said.missing == {"algorithm": python_code.STAYS_SET}
