"""Ray's variables on the way to a study: its token reaches no trial."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import sample_environment
from msgspec.structs import replace
from ray_clusters import require_ray

from steptune.service.cli.options import cluster_of
from steptune.service.launched import check_size, num_hosts_of
from steptune.service.on_ray.actor import agent_environment
from steptune.service.on_ray.hosts import Cluster, ranks_of_each, reserved_hosts, take_cluster
from steptune.service.on_ray.messages import AgentOrder, ReservationRequest
from steptune.service.on_ray.reservation import Reservation
from steptune.service.settings import Settings
from steptune.tuner.errors import ChoiceError, IsolationUnavailableError, PlatformError, StoreError
from steptune.tuner.records import Study, StudySettings
from steptune.tuner.trials.launch import Launch

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
            PlatformError, match=r"run code on its nodes. Start .*RAY_AUTH_MODE=token, or give --insecure-ray"
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
        assert found == {"NCCL_SOCKET_IFNAME": "ib0", "CUDA_VISIBLE_DEVICES": ""}

    def test_it_sees_the_gpus_that_ray_has_given_it(self) -> None:
        variables = {"CUDA_VISIBLE_DEVICES": "2,3"}
        assert agent_environment(variables, replace(ORDER, num_gpus=2)) == variables
        assert agent_environment(variables, ORDER) == {"CUDA_VISIBLE_DEVICES": ""}

    def test_its_ranks_have_the_threads_of_the_drivers(self) -> None:
        order = AgentOrder(port=1, secret="s", folder="/f", patience_s=1.0, variables={"OMP_NUM_THREADS": "4"})
        assert agent_environment({"OMP_NUM_THREADS": "2"}, order)["OMP_NUM_THREADS"] == "4"


class TestOptions:
    def test_several_hosts_need_somebody_who_brings_them(self) -> None:
        with pytest.raises(
            ChoiceError, match=r"--num-hosts 2 needs a cluster or a launcher: use --runner ray, or start .*torchrun"
        ):
            num_hosts_of(None, 2)
        assert num_hosts_of(None, 2, reserved=True) == 2
        assert num_hosts_of(None, None) == 1

    @pytest.mark.parametrize(("asked", "reserved"), [(3, False), (None, True)])
    def test_the_hosts_of_a_launcher_are_the_studys(self, asked: int | None, reserved: bool) -> None:
        launch = Launch(rank=0, local_rank=0, ranks_per_host=2, host=0, num_hosts=2, address="first")
        assert num_hosts_of(launch, 2) == 2
        with pytest.raises(ChoiceError, match="leave out --runner and --num-hosts"):
            num_hosts_of(launch, asked, reserved=reserved)

    def test_rays_options_need_ray(self) -> None:
        assert cluster_of("local", None, insecure=False) is None
        with pytest.raises(ChoiceError, match="--address and --insecure-ray require Ray: add --runner ray"):
            cluster_of("local", "host:6379", insecure=False)

    def test_a_study_on_several_hosts_is_not_resumed_on_one(self) -> None:
        settings = StudySettings(num_ranks=4, num_hosts=2)
        study = Study(study_id="a", workload="zoo:mlp", settings=settings, created_at="", directory="")
        begun = replace(study, environment=replace(sample_environment(), num_hosts=2))
        check_size(None, begun, reserved=True)
        with pytest.raises(StoreError, match="began with 4 ranks on 2 hosts, but this launch has 4 on 1"):
            check_size(None, begun)

    def test_nor_is_one_that_was_submitted_and_has_not_begun(self) -> None:
        settings = StudySettings(num_ranks=4, num_hosts=2)
        study = Study(study_id="a", workload="zoo:mlp", settings=settings, created_at="", directory="")
        check_size(None, study, reserved=True)
        with pytest.raises(StoreError, match="began with 4 ranks on 2 hosts, but this launch has 4 on 1"):
            check_size(None, study)


def test_ranks_that_do_not_divide_are_refused() -> None:
    settings = StudySettings(num_ranks=3, num_hosts=2)
    study = Study(study_id="a", workload="zoo:mlp", settings=settings, created_at="", directory="")
    with pytest.raises(ChoiceError, match=r"multiple of the number of hosts \(2\), got 3"):
        ranks_of_each(study)


@pytest.mark.parametrize("level", ["limits", "bubblewrap"])
def test_levels_that_keep_ranks_from_the_network_are_refused_on_several_hosts(level: str, tmp_path: Path) -> None:
    """Before the cluster is asked for any."""
    settings = StudySettings(num_ranks=2, num_hosts=2)
    study = Study(study_id="a", workload="zoo:mlp", settings=settings, created_at="", directory=str(tmp_path))
    cluster = Cluster(address="auto", insecure=True, variables={})
    with (
        pytest.raises(IsolationUnavailableError, match=f"isolation {level} blocks the network .* --isolation none"),
        reserved_hosts(cluster, study, Settings(_env_file=None), SimpleNamespace(name=level), print, timeout_s=1.0),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_node_whose_processor_ray_does_not_have_is_refused_in_words() -> None:
    """The head of kuberay.yml is such a node."""
    require_ray()
    request = ReservationRequest(
        address="auto", num_hosts=1, ranks_per_host=1, device="cpu", timeout_s=1.0, insecure=True, order=ORDER
    )
    found = Reservation(request, tell=lambda event: None, given_up=lambda: False)
    found._ray = SimpleNamespace(nodes=lambda: [{"NodeID": "me", "Resources": {"CPU": 0.0}}])
    with pytest.raises(PlatformError, match=r"the node of this process has no CPU in Ray.*on a node with CPUs"):
        found._bundle("me")
