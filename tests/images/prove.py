"""The images built by the Dockerfile's own steps, and the services of the Compose file run in them, without an engine.

    python tests/images/prove.py --output benchmarks/results/images.json

Builds `service` and `worker` (see `building.py`; as root, with debootstrap and a Python of the images' version), with a
package of a submitter. Then, in a network of its own that has loopback and nothing else, PostgreSQL is prepared as by
the Compose file, and `migrate`, `api` and `worker` run as that file says (see `containers.py`). Studies of the zoo and
of uploaded files are submitted; one of them is an attack. Each check is a line of the tally.
"""

import argparse
import ctypes
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from images.building import Builder, Image  # noqa: E402
from images.containers import Container  # noqa: E402
from images.dockerfile import Stage, parse  # noqa: E402
from images.stack import DATABASE, START_S, UID, Stack  # noqa: E402

from steptune.service.client import Client  # noqa: E402
from steptune.tuner.records import StudyState  # noqa: E402

PACKAGE = "einops"
"""Package that a submitter's workload imports."""
CLONE_NEWNET = 0x40000000
STUDY_S = 900.0
URL = "http://127.0.0.1:8700"
SECRETS = {"AWS_SECRET_ACCESS_KEY": "secret-of-the-store", "STEPTUNE_METRICS_TOKEN": "secret-of-the-metrics"}
QUICK = {"budget_s": 600, "max_trials": 1, "only": ["data_loading"], "device": "cpu"}
ZOO = (
    "zoo:synthetic?batch=4&load_ms=1&compute_ms=1&length=64",
    "zoo:transformers?model_type=gpt2&batch=2&sequence=16&n_layer=1&n_embd=32&n_head=2&vocab_size=64",
    "zoo:timm?name=resnet18&batch=2",
)
WORKLOAD = """
import einops
import torch
from regression import Regression


class Uses(Regression):
    def loss(self, model, batch):
        return super().loss(model, [einops.rearrange(leaf, "b f -> b f") for leaf in batch])
"""


ATTACK = f"""
from thief import Thief


class Attack(Thief):
    def __init__(self):
        super().__init__(paths={{paths!r}}, database="host={DATABASE}|user=steptune|dbname=steptune")
"""


class Proof:
    """Checks, one after the other; each returns what was seen."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._client: Client | None = None
        self._containers: dict[str, Container] = {}

    @property
    def checks(self) -> dict[str, Callable[[], Any]]:
        return {
            "both images run steptune --version": self.versions,
            "the image has the zoo's packages, the kernels, NVML's bindings and the submitter's package": self.imports,
            "migrate ends": partial(self._stack.output_of, "migrate"),
            "api answers /readyz": self.api,
            "worker offers an isolation that separates": self.worker,
            **{f"a study of {workload.partition('?')[0]} ends": partial(self.study, workload) for workload in ZOO},
            "a study of an uploaded folder that imports the submitter's package ends": self.uploaded,
            "a trial reads no secret of the service": self.attack,
            "worker and api end when they are told to": self.stop,
        }

    def versions(self) -> dict[str, str]:
        found = {name: self._stack.output_of(name, "steptune", "--version") for name in ("api", "worker")}
        assert all(re.search(r"\d+\.\d+\.\d+", text) for text in found.values())
        return found

    def imports(self) -> str:
        script = (
            "import sys, importlib.metadata as m, torch, transformers, timm, torchvision, pynvml, einops\n"
            "import steptune.kernels.applying, steptune.tuner.strategies\n"
            f"names = 'torch transformers timm torchvision nvidia-ml-py {PACKAGE}'.split()\n"
            "print('python', sys.version.split()[0], *(f'{name} {m.version(name)}' for name in names), sep=', ')"
        )
        return self._stack.output_of("worker", "python", "-c", script).splitlines()[-1]

    def api(self) -> str:
        self._containers["api"] = api = self._stack.start("api")
        _wait(lambda: "serves http" in api.output, api)
        token = re.search(r"^(stp_\S+)$", api.output, re.MULTILINE)
        assert token, api.output
        self._client = Client(URL, token[1])
        return self._stack.output_of("api", *self._stack.services["api"]["healthcheck"]["test"][1:]) or "healthy"

    def worker(self) -> str:
        self._containers["worker"] = worker = self._stack.start("worker")
        _wait(lambda: any(found.state == "idle" for found in self.client.workers()), worker)
        [found] = self.client.workers()
        assert found.isolation in ("limits", "bubblewrap")
        return found.isolation

    @property
    def client(self) -> Client:
        assert self._client is not None, "the API has not answered"
        return self._client

    def study(self, workload: str) -> dict[str, Any]:
        return self._ended(self.client.submit(workload, **QUICK).study_id)

    def _ended(self, study_id: str, state: StudyState = StudyState.COMPLETED) -> dict[str, Any]:
        ended = self.client.wait(study_id, STUDY_S)
        assert ended.state == state, ended.message
        trials = [self.client.trial(trial.trial_id) for trial in self.client.trials(study_id)]
        levels = {trial.isolation for trial in trials}
        assert levels <= {"limits"}
        return {"state": ended.state, "trials": len(trials), "isolation": sorted(filter(None, levels))}

    def uploaded(self) -> dict[str, Any]:
        folder = self._folder / "workload"
        folder.mkdir()
        shutil.copy(ROOT / "tests/workloads/regression.py", folder)
        (folder / "uses.py").write_text(WORKLOAD)
        sent = self.client.upload(folder, entry="uses.py:Uses")
        return self._ended(self.client.submit(workload_id=sent.workload_id, **QUICK).study_id)

    def attack(self) -> dict[str, Any]:
        folder = self._folder / "attack"
        folder.mkdir()
        for name in ("regression.py", "thief.py"):
            shutil.copy(ROOT / "tests/workloads" / name, folder)
        inside = Path("/var/lib/steptune")
        kept = [inside / path.relative_to(self._stack.data) for path in self._stack.data.rglob("*") if path.is_file()]
        targets = ["/run/secrets/postgres_password", "/proc/1/environ", "/etc/shadow", *map(str, kept[:200])]
        (folder / "attack.py").write_text(ATTACK.format(paths="|".join(targets)))
        sent = self.client.upload(folder, entry="attack.py:Attack")
        study_id = self.client.submit(workload_id=sent.workload_id, **QUICK).study_id
        self._ended(study_id, StudyState.FAILED)
        logs = "\n".join(path.read_text() for path in (self._stack.data / "studies" / study_id / "logs").glob("*.log"))
        found = re.search(r"^SEEN (.*)$", logs, re.MULTILINE)
        assert found, logs
        return _judged(json.loads(found[1]), len(targets))

    def stop(self) -> dict[str, int]:
        found = {name: self._containers[name].stop() for name in ("worker", "api")}
        assert set(found.values()) == {0}, self._containers["worker"].output
        return found


def _judged(seen: dict[str, Any], num_targets: int) -> dict[str, Any]:
    for deed in ("read", "written", "linked", "users"):
        assert seen[deed] == [], (deed, seen[deed])
    assert seen["processes"] == {}
    told = json.dumps([seen["environment"], seen["helpers"], seen["descriptors"]])
    assert "secret-of" not in told
    assert "STEPTUNE_DATABASE" not in told
    assert seen["postgres"]["written"] == []
    assert any("password authentication failed" in said for said in seen["postgres"]["said"]), seen["postgres"]
    assert not {0, UID} & set(seen["ids"])
    assert {int(seen["status"][name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    return {
        "files_tried": num_targets,
        "files_read": len(seen["read"]),
        "processes_reached": len(seen["processes"]),
        "passwords_refused": len(seen["postgres"]["said"]),
        "user": seen["ids"][0],
    }


def _wait(condition: Callable[[], object], container: Container) -> None:
    deadline_s = time.monotonic() + START_S
    while not condition():
        assert container.process.poll() is None, container.output
        assert time.monotonic() < deadline_s, container.output
        time.sleep(0.2)


def run_checks(proof: Proof) -> list[dict[str, Any]]:
    """Return a line for each check; after one that fails, those that follow are not run."""
    tally: list[dict[str, Any]] = []
    for name, check in proof.checks.items():
        try:
            tally.append({"check": name, "passed": True, "seen": check()})
        except Exception as error:
            tally.append({"check": name, "passed": False, "seen": f"{type(error).__name__}: {error}"[-4000:]})
            break
        finally:
            sys.stderr.write(f"{json.dumps(tally[-1])}\n")
    return tally


def prove(images: dict[str, Image]) -> list[dict[str, Any]]:
    """Run all checks; from here on this process has a network of its own."""
    _leave_network()
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="st-")))
        folder.chmod(0o755)
        stack = Stack(folder, images, SECRETS)
        cleanup.callback(stack.close)
        return run_checks(Proof(stack, folder))


def _leave_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network of its own needs root, or CAP_SYS_ADMIN")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def built(folder: Path, stages: Mapping[str, Stage], interpreter: Path, shown: Sequence[Path]) -> dict[str, Image]:
    """The images of the Dockerfile, with the submitter's package."""
    arguments = {"PACKAGES": PACKAGE}
    builder = Builder(
        folder=folder, context=ROOT, stages=stages, interpreter=interpreter, arguments=arguments, shown=shown
    )
    return {name: builder.image(name) for name in ("service", "worker")}


def interpreter_for(stages: Mapping[str, Stage]) -> Path:
    """The prefix of this machine's Python of the images' version."""
    [version] = {found[1] for stage in stages.values() if (found := re.match(r"python:(\d+\.\d+)", stage.base))}
    ask = [f"python{version}", "-c", "import sys; print(sys.base_prefix)"]
    return Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpreter", type=Path, help="prefix of a Python of the images' version")
    parser.add_argument("--show", type=Path, action="append", default=[], help="a file or folder that pip needs here")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    stages = parse((ROOT / "Dockerfile").read_text())
    with tempfile.TemporaryDirectory(prefix="st-images-") as folder:
        Path(folder).chmod(0o755)
        images = built(Path(folder), stages, arguments.interpreter or interpreter_for(stages), arguments.show)
        sizes = {name: _size_bytes(image.root) for name, image in images.items()}
        tally = prove(images)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "base": stages["build"].base,
        "packages": PACKAGE,
        "size_gb": {name: round(size / 1e9, 2) for name, size in sizes.items()},
        "kernel": platform.release(),
        "command": "python tests/images/prove.py",
        "checks": tally,
    }
    text = json.dumps(report, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text)
    sys.exit(0 if all(line["passed"] for line in tally) else 1)


def _size_bytes(root: Path) -> int:
    counted = subprocess.run(["du", "-sb", str(root)], check=True, capture_output=True, text=True).stdout
    return int(counted.split()[0])


if __name__ == "__main__":
    main()
