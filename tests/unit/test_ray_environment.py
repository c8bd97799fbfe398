"""What Ray's variables become on the way to a study: its token reaches no trial."""

import os

import pytest
from ray_clusters import require_ray

from steptune.service.on_ray.actor import agent_environment
from steptune.service.on_ray.hosts import ranks_of_each, take_cluster
from steptune.service.on_ray.messages import AgentOrder
from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.records import Study, StudySettings

ORDER = AgentOrder(port=1, secret="s", folder="/f", patience_s=1.0, variables={})


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    require_ray()
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    return monkeypatch


class TestTheCommand:
    @pytest.mark.parametrize("mode", [None, "disabled"])
    def test_without_token_authentication_it_is_refused(self, variables: pytest.MonkeyPatch, mode: str | None) -> None:
        if mode:
            variables.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(
            PlatformError, match=r"run code on its nodes: .*RAY_AUTH_MODE=token, or give --insecure-ray"
        ):
            take_cluster("auto", insecure=False)

    def test_the_token_is_kept_for_the_reservation_and_taken_from_all_else(self, variables: pytest.MonkeyPatch) -> None:
        variables.setenv("RAY_AUTH_MODE", "token")
        cluster = take_cluster("host:6379", insecure=False)
        assert cluster.variables["RAY_AUTH_TOKEN"] == "secret"
        assert "secret" not in repr(cluster)
        assert not [name for name in os.environ if name.startswith("RAY_")]

    def test_a_user_may_trust_the_network(self, variables: pytest.MonkeyPatch) -> None:
        assert take_cluster("auto", insecure=True).insecure


class TestTheAgent:
    def test_it_gets_the_nodes_environment_without_what_is_rays(self) -> None:
        found = agent_environment(
            {"RAY_AUTH_TOKEN": "secret", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "2", "NCCL_SOCKET_IFNAME": "ib0"}, ORDER
        )
        assert found == {"NCCL_SOCKET_IFNAME": "ib0"}

    def test_its_ranks_have_the_threads_of_the_drivers(self) -> None:
        order = AgentOrder(port=1, secret="s", folder="/f", patience_s=1.0, variables={"OMP_NUM_THREADS": "4"})
        assert agent_environment({"OMP_NUM_THREADS": "2"}, order) == {"OMP_NUM_THREADS": "4"}


def test_ranks_that_do_not_divide_are_refused() -> None:
    settings = StudySettings(num_ranks=3, num_hosts=2)
    study = Study(study_id="a", workload="zoo:mlp", settings=settings, created_at="", directory="")
    with pytest.raises(ChoiceError, match="3 ranks cannot be spread evenly over 2 hosts"):
        ranks_of_each(study)
