"""The manifest for KubeRay, by reading it: no Kubernetes is here."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from steptune.service.cli.main import application
from steptune.service.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "kuberay.yml").read_text())


@pytest.fixture(scope="module")
def containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    spec = cluster["spec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    found = [pod["template"]["spec"] for pod in pods]
    assert all(pod["securityContext"]["runAsUser"] == 10001 for pod in found)
    return [container for pod in found for container in pod["containers"]]


def test_it_is_a_cluster_with_the_pinned_ray_and_a_token(cluster: dict[str, Any]) -> None:
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


def test_all_containers_have_the_image_that_its_head_says_how_to_build(containers: list[dict[str, Any]]) -> None:
    text = (ROOT / "kuberay.yml").read_text()
    [(target, extras, image)] = re.findall(r"docker build --target (\w+) --build-arg EXTRAS=(\S+) --tag (\S+) \.", text)
    assert {container["image"] for container in containers} == {image}
    recipe = (ROOT / "Dockerfile").read_text()
    assert f"AS {target}\n" in recipe
    assert '".[$EXTRAS]"' in recipe
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras.split(","))


def test_ray_is_started_in_the_foreground_where_the_command_is_our_own(
    cluster: dict[str, Any], containers: list[dict[str, Any]]
) -> None:
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    for container in containers:
        assert container["command"] == ["/bin/bash", "-c", "--"]
        assert container["args"][0].endswith("exec $KUBERAY_GEN_RAY_START_CMD")
        assert container["readinessProbe"]["exec"]
        assert container["livenessProbe"]["exec"]


def test_the_worker_is_a_command_of_steptune_on_as_many_hosts_as_there_are_pods(
    cluster: dict[str, Any], containers: list[dict[str, Any]]
) -> None:
    [group] = cluster["spec"]["workerGroupSpecs"]
    [text] = re.findall(r"do steptune (worker .*?); done &", containers[1]["args"][0])
    words = shlex.split(text)
    command = get_command(application()).commands["worker"]  # type: ignore[attr-defined]
    given = command.make_context("worker", words[1:]).params
    assert (given["runner"], given["num_hosts"], given["isolation"]) == ("ray", group["replicas"], "none")


def test_its_settings_exist_and_none_is_secret_in_it(containers: list[dict[str, Any]]) -> None:
    for variable in containers[1]["env"]:
        assert variable["name"].removeprefix("STEPTUNE_").lower() in Settings.model_fields
    secret = {variable["name"] for variable in containers[1]["env"] if "valueFrom" in variable}
    assert secret == {"STEPTUNE_DATABASE_URL", "STEPTUNE_ARTIFACTS_URL"}
