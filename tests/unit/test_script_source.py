"""Submitted scripts: what goes along, what is refused, and what a worker must have."""

import re
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from builders import sample_facts, sample_study

from steptune.service.cli.submit_script import manifest_of
from steptune.service.client.packing import SCRIPT_LIMITS, check_source, is_source, pack
from steptune.service.isolation import LEVELS, NONE
from steptune.service.script_source import (
    MANIFEST,
    ScriptManifest,
    check_packages,
    check_variables,
    imported_packages,
    interpreter_of,
    link_data,
    read_manifest,
)
from steptune.service.secret_names import secret_in
from steptune.service.studies import check_unchanged
from steptune.service.uploads import receive
from steptune.service.worker.scripts import prepare_script
from steptune.tuner.errors import ChoiceError, IsolationUnavailableError, StoreError, WorkloadRejectedError
from steptune.tuner.records import ScriptFacts

MINE = ScriptManifest(command=("python", "train.py"))
NUMPY = metadata.version("numpy")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("import os\nfrom numpy import random\nimport helper\n")
    (folder / "helper.py").write_text("def load():\n    import yaml\n")
    (folder / "config.yaml").write_text("lr: 0.1\n")
    (folder / "large.json").write_text(" " * (SCRIPT_LIMITS.file_bytes + 1))
    (folder / "last.pt").write_bytes(b"weights")
    (folder / "data" / "index.txt").write_text("1\n")
    return folder


def packed(project: Path, manifest: ScriptManifest = MINE) -> Path:
    target = project.parent / "script.tar.gz"
    pack(project, target, SCRIPT_LIMITS, wanted=is_source, beside={MANIFEST: msgspec.json.encode(manifest)})
    return target


class TestSending:
    def test_sources_go_along_and_data_does_not(self, project: Path) -> None:
        with tarfile.open(packed(project)) as archive:
            names = set(archive.getnames())
        assert names == {"train.py", "helper.py", "config.yaml", "data/index.txt", MANIFEST}

    @pytest.mark.parametrize(
        "name",
        ["HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_AUTH", "DB_PWD", "DATABASE_URL"],
    )
    def test_variables_that_sound_like_secrets_are_refused_with_the_way_out(self, name: str) -> None:
        with pytest.raises(WorkloadRejectedError, match=f"{name} looks like a secret.*worker's own environment"):
            check_variables({name: "1"})

    def test_a_value_that_is_a_secret_is_refused_whatever_it_is_called(self) -> None:
        with pytest.raises(WorkloadRejectedError, match="HTTPS_PROXY looks like a secret") as refused:
            check_variables({"HTTPS_PROXY": "http://me:hidden@proxy:3128"})
        assert "hidden" not in str(refused.value)

    def test_variables_of_tokenizers_are_sent(self) -> None:
        check_variables({"TOKENIZERS_PARALLELISM": "false", "PROXY": "http://proxy:3128"})

    @pytest.mark.parametrize(
        "name",
        [
            "credentials.json",
            "client_secret_1.json",
            "secrets/db.yaml",
            "token.txt",
            "hf_token.txt",
            "kaggle.json",
            "service_account.json",
            "id_rsa.txt",
            "api_key.txt",
            "secrets.py",
            "config/secrets.toml",
        ],
    )
    def test_files_that_are_called_like_secrets_stay_behind(self, project: Path, name: str) -> None:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
        with tarfile.open(packed(project)) as archive:
            assert name not in archive.getnames()

    @pytest.mark.parametrize(
        "name", ["tokenizer.json", "special_tokens_map.json", "token.py", "password_data.py", "keys.yaml", "auth.py"]
    )
    def test_files_of_a_model_go_along(self, project: Path, name: str) -> None:
        (project / name).write_text("x")
        with tarfile.open(packed(project)) as archive:
            assert name in archive.getnames()

    @pytest.mark.parametrize(
        "line", [f"login('hf_{'a' * 34}')", "-----BEGIN OPENSSH " + "PRIVATE KEY-----", "u = 'http://me:hidden@host/'"]
    )
    def test_a_source_in_which_a_secret_stands_is_refused(self, project: Path, line: str) -> None:
        check_source(project / "train.py")
        (project / "train.py").write_text(f"import os\n{line}\n")
        with pytest.raises(WorkloadRejectedError, match=r"train\.py, line 2, looks like") as refused:
            check_source(project / "train.py")
        assert "hidden" not in str(refused.value)

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            (["python", "train.py", "hub.token=hidden"], "hub.token"),
            (["python", "train.py", "+logger.api_key=hidden"], "logger.api_key"),
            (["env", "GITHUB_TOKEN=hidden", "python", "train.py"], "GITHUB_TOKEN"),
            (["sh", "-c", "WANDB_API_KEY=hidden python train.py"], "WANDB_API_KEY"),
            (["sh", "-c", "python train.py --token hidden"], "--token"),
            (["python", "train.py", "--url=http://me:hidden@host/"], "an argument"),
        ],
    )
    def test_secrets_anywhere_in_a_command_are_refused_by_name(
        self, project: Path, command: list[str], name: str
    ) -> None:
        with pytest.raises(ChoiceError, match=f"{re.escape(name)} looks like a secret") as refused:
            manifest_of(command, project, [], [], other_versions=False)
        assert "hidden" not in str(refused.value)

    @pytest.mark.parametrize(
        "given", ["--num-tokens=5", "--pad-token=0", "model.token=mean", "TOKENIZERS_PARALLELISM=false", "a::b@c"]
    )
    def test_words_of_models_are_no_secrets(self, given: str) -> None:
        assert secret_in(["python", "train.py", given]) is None

    @pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "A=B", ""])
    def test_variables_of_one_machine_are_refused(self, name: str) -> None:
        with pytest.raises(WorkloadRejectedError, match="is not a valid variable name"):
            check_variables({name: "1"})

    def test_only_named_variables_are_sent(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WIDTH", "16")
        monkeypatch.setenv("DEPTH", "2")
        manifest = manifest_of(["python", "train.py"], project, ["WIDTH"], [], other_versions=False)
        assert manifest.variables == {"WIDTH": "16"}

    @pytest.mark.parametrize(
        ("command", "env", "data", "said"),
        [
            ([], [], [], "no command after `--`"),
            (
                ["/home/me/venv/bin/python", "train.py"],
                [],
                [],
                "/home/me/venv/bin/python may be absent on workers: write python",
            ),
            (["python", "train.py", "--hub-token=x"], [], [], "--hub-token looks like a secret"),
            (["python", "train.py"], ["NOT_SET_HERE"], [], "--env NOT_SET_HERE names a variable that is not set here"),
            (["python", "train.py"], [], ["../data"], "is outside this folder: give an absolute path"),
            (["python", "x" * 600], [], [], "at most 500 characters, got 6"),
        ],
    )
    def test_what_means_something_here_only_is_refused(
        self, project: Path, command: list[str], env: list[str], data: list[str], said: str
    ) -> None:
        with pytest.raises(ChoiceError, match=said):
            manifest_of(command, project, env, data, other_versions=False)

    def test_packages_are_those_that_the_sources_import(self, project: Path) -> None:
        """They have the names under which they are installed; modules beside the script and of Python are none."""
        found = imported_packages(project.glob("*.py"), sys.executable)
        assert found == {"numpy": NUMPY, "PyYAML": metadata.version("PyYAML")}

    def test_an_environment_beside_the_script_is_none_of_its_sources(self, tmp_path: Path) -> None:
        """Whatever the folders above are called."""
        folder = tmp_path / ".hidden" / "project"
        (folder / "venv").mkdir(parents=True)
        (folder / "train.py").write_text("import numpy\n")
        (folder / "venv" / "other.py").write_text("import yaml\n")
        assert manifest_of(["python", "train.py"], folder, [], [], other_versions=False).packages == {"numpy": NUMPY}

    def test_data_in_the_folder_keeps_its_name(self, project: Path) -> None:
        manifest = manifest_of(["python", "train.py"], project, [], ["data/", "/data/tokens"], other_versions=False)
        assert manifest.data == {"data": str(project / "data"), "/data/tokens": "/data/tokens"}

    def test_the_interpreter_beside_a_launcher_is_the_commands(self, tmp_path: Path) -> None:
        for name in ("torchrun", "python"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        assert interpreter_of(["torchrun", "train.py"], str(tmp_path)) == str(tmp_path / "python")


class TestReceiving:
    def test_an_upload_is_a_script_with_its_command(self, project: Path, tmp_path: Path) -> None:
        (tmp_path / "received").mkdir()
        with packed(project).open("rb") as file:
            upload = receive(file, "project.tar.gz", "-- python train.py", tmp_path / "received")
        assert (upload.kind, upload.entry) == ("script", "-- python train.py")

    @pytest.mark.parametrize(
        ("manifest", "said"),
        [
            (ScriptManifest(command=("sh", "other.sh")), "must be the command in the archive, '-- sh other.sh'"),
            (ScriptManifest(command=()), "has no command"),
            (ScriptManifest(command=MINE.command, variables={"HF_TOKEN": "x"}), "HF_TOKEN looks like a secret"),
            (
                ScriptManifest(command=("python", "train.py", "--token=x")),
                "--token of the command looks like a secret",
            ),
            (
                ScriptManifest(command=MINE.command, data={"a": "/x", "a/b": "/y"}),
                "'a/b' is inside another named data path",
            ),
            (ScriptManifest(command=MINE.command, data={"../x": "/x"}), "is outside the script's folder"),
        ],
    )
    def test_what_the_command_line_refuses_the_service_refuses(
        self, project: Path, tmp_path: Path, manifest: ScriptManifest, said: str
    ) -> None:
        (tmp_path / "received").mkdir()
        with packed(project, manifest).open("rb") as file, pytest.raises(WorkloadRejectedError, match=said):
            receive(file, "project.tar.gz", "-- python train.py", tmp_path / "received")

    def test_an_archive_that_says_nothing_of_a_script_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadRejectedError, match="steptune submit -- COMMAND") as refused:
            read_manifest(tmp_path)
        assert str(tmp_path) not in str(refused.value)


class TestOnAWorker:
    def test_a_missing_package_is_named(self) -> None:
        manifest = ScriptManifest(command=MINE.command, packages={"no-such-package-at-all": "1.0", "numpy": NUMPY})
        with pytest.raises(WorkloadRejectedError, match=r"the worker has no no-such-package-at-all 1\.0: install it"):
            check_packages(manifest, sys.executable)

    def test_another_version_is_refused_unless_it_was_allowed(self) -> None:
        manifest = ScriptManifest(command=MINE.command, packages={"numpy": "1.0"})
        with pytest.raises(WorkloadRejectedError, match=f"numpy {NUMPY} in place of 1.0.*--other-versions"):
            check_packages(manifest, sys.executable)
        check_packages(msgspec.structs.replace(manifest, other_versions=True), sys.executable)

    def test_another_build_of_the_same_version_is_the_same(self) -> None:
        manifest = ScriptManifest(command=MINE.command, packages={"numpy": f"{NUMPY}+cu130"})
        check_packages(manifest, sys.executable)

    def test_data_lies_where_the_script_looks_for_it(self, project: Path, tmp_path: Path) -> None:
        folder = tmp_path / "source"
        folder.mkdir()
        manifest = ScriptManifest(command=MINE.command, data={"in/data": str(project / "data"), "/tmp": "/tmp"})
        link_data(manifest, folder)
        assert (folder / "in" / "data" / "index.txt").read_text() == "1\n"

    def test_absent_data_is_named(self, tmp_path: Path) -> None:
        manifest = ScriptManifest(command=MINE.command, data={"/nowhere/at/all": "/nowhere/at/all"})
        with pytest.raises(WorkloadRejectedError, match="the worker has no /nowhere/at/all: mount it there"):
            link_data(manifest, tmp_path)

    @pytest.mark.parametrize("level", [level for level in LEVELS if level.name != NONE], ids=lambda level: level.name)
    def test_levels_that_isolate_trials_refuse_it(self, level, project: Path) -> None:
        """Whatever claimed it: nothing of the script has run."""
        with pytest.raises(IsolationUnavailableError, match=f"isolation {level.name} forbids.*--isolation none"):
            prepare_script(sample_study(), project, level, lambda: None)


def test_a_script_that_was_submitted_is_not_gone_on_with_here() -> None:
    """Its sources are at the service, whether a worker has looked at it or not."""
    study = sample_study(workload="-- python train.py", facts=None, source_digest="0" * 16)
    with pytest.raises(StoreError, match="is at a service: begin a new study"):
        check_unchanged(study)
    script = ScriptFacts(command=MINE.command, folder="/nowhere/at/all")
    looked_at = msgspec.structs.replace(study, facts=sample_facts(script=script))
    with pytest.raises(StoreError, match="is in /nowhere/at/all, which no longer exists"):
        check_unchanged(looked_at)
