"""The Compose file by the real parser, and the image's recipe by reading it: no engine is needed, so none is run."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compose_file import COMPOSE_FILE, compose, services_beside
from images.dockerfile import Stage, parse
from postgres import PostgresServer, server_binaries
from sqlalchemy.exc import ProgrammingError
from typer.main import get_command

from steptune.service.cli.main import application
from steptune.service.connections import create_engine_for, is_superuser, reading, writing
from steptune.service.database import migrate
from steptune.service.settings import Settings, load_settings
from steptune.tuner.errors import ChoiceError
from steptune.tuner.workloads.zoo import ZOO

ROOT = Path(__file__).parents[2]
ORDINARY = ("migrate", "api", "worker", "worker-gpu")
"""Services of our own image."""
TO_CHANGE_USER = ("CHOWN", "KILL", "SETGID", "SETUID")


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    """With all profiles."""
    ended = compose("--profile", "*", "config", "--format", "json", STEPTUNE_POSTGRES_PASSWORD_FILE="./secret")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def services(parsed) -> dict[str, dict[str, Any]]:
    return parsed["services"]


@pytest.fixture
def with_settings(tmp_path):
    """The services beside a file `.env` with these lines."""
    return partial(services_beside, tmp_path)


class TestCompose:
    def test_it_is_refused_without_a_password_and_says_where_to_set_it(self):
        """There is no default."""
        for variables in ({}, {"STEPTUNE_POSTGRES_PASSWORD_FILE": ""}):
            ended = compose("config", "--quiet", **variables)
            assert ended.returncode != 0
            assert "STEPTUNE_POSTGRES_PASSWORD_FILE" in ended.stderr
            assert ".env.example" in ended.stderr

    def test_the_example_of_the_settings_is_complete(self):
        """With it, and nothing else, the file is valid."""
        assert compose("--env-file", str(ROOT / ".env.example"), "config", "--quiet").returncode == 0

    def test_the_gpu_worker_is_there_only_when_asked_for(self, services):
        """A machine without a GPU could not start it. `utility` is NVML, by which workers watch their devices."""
        plain = compose("config", "--services", STEPTUNE_POSTGRES_PASSWORD_FILE="./secret")
        assert sorted(plain.stdout.split()) == ["api", "migrate", "postgres", "worker"]
        assert set(services) == {"api", "migrate", "postgres", "worker", "worker-gpu"}
        [device] = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu", "compute", "utility"])

    def test_each_waits_for_what_it_needs(self, services):
        """The schema is migrated once, before anything uses it."""
        assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
        for name in ("api", "worker", "worker-gpu"):
            needs = {other: entry["condition"] for other, entry in services[name]["depends_on"].items()}
            assert needs == {"postgres": "service_healthy", "migrate": "service_completed_successfully"}
        for name in ("postgres", "api"):
            assert services[name]["healthcheck"]["test"][0] == "CMD"
        assert "/readyz" in services["api"]["healthcheck"]["test"][-1]

    @pytest.mark.parametrize(("age_s", "status"), [(0, 0), (3600, 1), (None, 1)])
    def test_a_worker_is_healthy_while_it_touches_its_file(self, services, tmp_path, age_s, status):
        path = tmp_path / "alive"
        if age_s is not None:
            path.touch()
            os.utime(path, (time.time() - age_s,) * 2)
        for name in ("worker", "worker-gpu"):
            kind, _, *arguments = services[name]["healthcheck"]["test"]
            assert kind == "CMD"
            own = services[name]["environment"]["STEPTUNE_ALIVE_FILE"]
            assert own in arguments[-1]
            arguments[-1] = arguments[-1].replace(own, str(path))
            ended = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
            assert ended.returncode == status

    def test_nothing_is_privileged(self, services):
        """Ordinary users, no capabilities but what PostgreSQL needs to become one, nothing written outside volumes."""
        for name, service in services.items():
            assert not service.get("privileged")
            assert service["cap_drop"] == ["ALL"]
            assert service["read_only"] is True
            assert "no-new-privileges:true" in service["security_opt"]
            assert not {"network_mode", "pid", "ipc", "devices"} & set(service)
            assert all(mount["type"] == "volume" for mount in service["volumes"])
            assert service["restart"] in ("unless-stopped", "on-failure:3")
            if name.startswith("worker"):
                assert service["user"] == "0:0"  # until its entry point
                assert sorted(service["cap_add"]) == sorted(TO_CHANGE_USER)
            elif name in ORDINARY:
                assert service["user"] == "10001:10001"
                assert "cap_add" not in service

    def test_only_the_api_is_reached_and_only_from_this_machine(self, services):
        """Until somebody says otherwise."""
        assert {name for name, service in services.items() if service.get("ports")} == {"api"}
        assert [port["host_ip"] for port in services["api"]["ports"]] == ["127.0.0.1"]

    def test_the_password_is_a_file_and_in_no_environment(self, parsed, services):
        """`docker inspect` shows environments."""
        assert set(parsed["secrets"]) == {"postgres_password"}
        for service in services.values():
            assert [secret["source"] for secret in service["secrets"]] == ["postgres_password"]
            values = {k: v for k, v in service["environment"].items() if "PASSWORD" in k or "URL" in k}
            for name, value in values.items():
                assert name.endswith("_FILE") or not re.search("://[^/]*:[^/]*@", value), name

    def test_settings_of_the_file_reach_our_containers(self, with_settings):
        """Settings of the Compose file itself go before them."""
        services = with_settings(
            "STEPTUNE_PUBLIC_URL=https://tune.example.org",
            'STEPTUNE_NEW_USER_SCOPES="read submit"',
            "AWS_ACCESS_KEY_ID=key",
            "STEPTUNE_ARTIFACTS_URL=s3://bucket/steptune",
            "STEPTUNE_DATA_DIRECTORY=/elsewhere",
        )
        for name in ORDINARY:
            found = services[name]["environment"]
            assert found["STEPTUNE_PUBLIC_URL"] == "https://tune.example.org"
            assert found["STEPTUNE_NEW_USER_SCOPES"] == "read submit"
            assert (found["AWS_ACCESS_KEY_ID"], found["STEPTUNE_ARTIFACTS_URL"]) == ("key", "s3://bucket/steptune")
            assert found["STEPTUNE_DATA_DIRECTORY"] == "/var/lib/steptune"
        assert "STEPTUNE_PUBLIC_URL" not in services["postgres"]["environment"]

    def test_workers_do_not_get_the_servers_own_secrets(self, with_settings):
        services = with_settings(
            *(f"STEPTUNE_{name}=secret" for name in ("METRICS_TOKEN", "OIDC_CLIENT_SECRET", "PROXY_SECRET")),
            "STEPTUNE_PROXY_USER_HEADER=X-User",
        )
        assert "secret" in services["api"]["environment"].values()
        for name in ("worker", "worker-gpu"):
            found = services[name]["environment"]
            assert not {"secret", "X-User"} & set(found.values())
            kept = {key.removeprefix("STEPTUNE_").lower(): found[key] for key in found if "PROXY" in key}
            assert Settings(_env_file=None, **kept).proxy_secret is None  # what is left contradicts nothing

    def test_the_example_names_settings_that_there_are(self):
        """Each belongs to Compose itself, to Steptune, or to an object store's library."""
        text = (ROOT / ".env.example").read_text()
        names = set(re.findall(r"^#?STEPTUNE_([A-Z_]+)=", text, re.MULTILINE))
        assert names - {"POSTGRES_PASSWORD_FILE", "BIND"} <= {name.upper() for name in Settings.model_fields}

    def test_images_are_pinned(self, services):
        """To an exact version, and ours are built here."""
        assert re.fullmatch(r"postgres:\d+\.\d+-\w+", services["postgres"]["image"])
        assert all("build" in services[name] for name in ORDINARY)

    @pytest.mark.parametrize("name", ORDINARY)
    def test_commands_are_ones_that_steptune_has(self, services, name):
        """With options that they have."""
        command: Any = get_command(application())
        words = iter(services[name]["command"])
        for word in words:
            if word.startswith("--"):
                assert any(word in (*parameter.opts, *parameter.secondary_opts) for parameter in command.params)
            elif hasattr(command, "commands"):
                assert word in command.commands
                command = command.commands[word]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return parse((ROOT / "Dockerfile").read_text())


class TestDockerfile:
    def test_bases_are_exact_versions_or_other_stages(self, stages):
        for stage in stages.values():
            assert stage.base in stages or re.fullmatch(r"python:3\.1[12]\.\d+-slim-\w+", stage.base)

    def test_what_is_copied_exists_and_is_not_ignored(self, stages):
        """Also that everything the installation needs is copied."""
        allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        copied = {
            source
            for stage in stages.values()
            for instruction in stage.all("COPY")
            if instruction.source_stage is None
            for source in instruction.paths[0]
        }
        assert copied == allowed
        assert all((ROOT / source).exists() for source in copied)

    def test_the_service_is_an_ordinary_user(self, stages):
        """Its user is that of the Compose file; what it writes is its own."""
        assert stages["service"].all("USER")[-1].text == "10001:10001"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
    def test_the_worker_becomes_that_user_and_keeps_what_changes_users(self, stages):
        """Its entry point as it is, under the capabilities of the Compose file, around another command."""
        [entry] = [instruction.exec_form for instruction in stages["worker"].all("ENTRYPOINT")]
        assert entry.pop() == "steptune"
        allowed = ",".join(f"+{name.lower()}" for name in TO_CHANGE_USER)
        container = ["setpriv", f"--bounding-set=-all,{allowed}", "--inh-caps=-all", "--no-new-privs", "--"]
        done = subprocess.run(
            [*container, *entry, "cat", "/proc/self/status"], capture_output=True, text=True, check=True
        )
        status = dict(line.split(":\t", 1) for line in done.stdout.splitlines())
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"}
        assert status["Groups"].split() in ([], ["10001"])
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7

    def test_packages_come_from_the_index_that_pip_is_configured_with(self, stages):
        """No host is named; what chooses another index has no default."""
        text = (ROOT / "Dockerfile").read_text() + COMPOSE_FILE.read_text() + (ROOT / ".env.example").read_text()
        assert not re.findall(r"(?:pypi|pytorch|pythonhosted)\.org", text)
        arguments = [instruction.text for instruction in stages["build"].all("ARG")]
        assert sorted(name for name in arguments if "=" not in name) == [
            "PIP_INDEX_URL",
            "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_STEPTUNE",
            "TORCH_INDEX",
        ]

    def test_no_secret_is_built_in(self, stages):
        texts = [instruction.text for stage in stages.values() for instruction in stage.instructions]
        assert not [text for text in texts if re.search("(?i)password|token|secret", text)]

    def test_what_the_settings_and_the_zoo_offer_is_installed(self, stages):
        """Object stores, logins by OpenID Connect, models of other libraries and the state of GPUs are extras."""
        [extras] = [value for arg in stages["build"].all("ARG") for name, value in arg.pairs if name == "EXTRAS"]
        assert any(".[$EXTRAS]" in run.text for run in stages["build"].all("RUN"))
        needed = {"torchvision": "timm"}
        of_the_zoo = {needed.get(package, package) for entry in ZOO for package in entry.needs}
        assert set(extras.split(",")) == {"torch", "postgresql", "s3", "oidc", "cuda", *of_the_zoo}

    def test_torch_is_the_pinned_one(self, stages):
        [pinned] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert any(pinned in run.words for run in stages["build"].all("RUN"))

    def test_the_last_stage_of_each_image_runs_a_command_that_exists(self, stages):
        commands = get_command(application()).commands
        for name in ("service", "worker"):
            [arguments] = [instruction.exec_form for instruction in stages[name].all("CMD")]
            assert arguments[0] in commands


@pytest.mark.skipif(server_binaries() is None, reason="needs PostgreSQL")
def test_the_services_role_owns_its_database_and_is_no_superuser(tmp_path_factory, monkeypatch):
    """The file that a new volume is prepared with, as the image's entry point runs it."""
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    server = PostgresServer(folder, superuser="postgres")
    monkeypatch.setenv("POSTGRES_PASSWORD", "it's a:secret")
    server.start()
    try:
        where = ["--host", str(folder), "--username", "postgres", "--dbname", "postgres"]
        script = ROOT / "docker-database.sql"
        psql = [str(server_binaries() / "psql"), "--no-psqlrc", "--set", "ON_ERROR_STOP=1", *where]
        subprocess.run([*psql, "--file", str(script)], check=True, capture_output=True)
        url = server.url("steptune")
        migrate(url)
        engine = create_engine_for(url)
        assert not is_superuser(engine)
        with reading(engine) as session:
            assert session.connection().exec_driver_sql("SELECT current_user").scalar() == "steptune"
        for forbidden in (
            "COPY (SELECT 1) TO PROGRAM 'true'",
            "CREATE ROLE other",
            "SELECT pg_read_file('/etc/passwd')",
        ):
            with (
                pytest.raises(ProgrammingError, match=r"permission denied|must be superuser"),
                writing(engine) as session,
            ):
                session.connection().exec_driver_sql(forbidden)
        engine.dispose()
        query = "SELECT rolname, rolpassword IS NULL FROM pg_authid WHERE rolname IN ('postgres', 'steptune')"
        ended = subprocess.run([*psql, "-tAc", query], check=True, capture_output=True, text=True)
        assert set(ended.stdout.split()) == {"postgres|t", "steptune|f"}
    finally:
        server.stop()
        shutil.rmtree(folder)


class TestPasswordFile:
    def test_the_password_comes_from_its_file(self, tmp_path, monkeypatch):
        """Characters that mean something in a URL are kept; the URL without it is not enough to log in."""
        path = tmp_path / "password"
        path.write_text("a:b/c@d\n")
        monkeypatch.setenv("STEPTUNE_DATABASE_URL", "postgresql+psycopg://me@host/db")
        monkeypatch.setenv("STEPTUNE_DATABASE_PASSWORD_FILE", str(path))
        assert load_settings().database_url == "postgresql+psycopg://me:a%3Ab%2Fc%40d@host/db"

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("STEPTUNE_DATABASE_URL", "postgresql+psycopg://me@host/db")
        monkeypatch.setenv("STEPTUNE_DATABASE_PASSWORD_FILE", str(tmp_path / "absent"))
        with pytest.raises(ChoiceError, match=r"database_password_file cannot be read: .*absent"):
            load_settings()


def test_a_secret_that_cannot_be_used_is_not_shown(monkeypatch):
    monkeypatch.setenv("STEPTUNE_PROXY_SECRET", "hunter2")
    with pytest.raises(ChoiceError, match="proxy_secret: ") as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)
