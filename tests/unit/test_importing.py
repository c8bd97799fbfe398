"""Files that were written as scripts are noticed while they are imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.workloads import importing
from steptune.tuner.workloads.loading import load_workload

WORKLOAD = """
import multiprocessing
import time
import torch
import steptune

class Line(steptune.Workload):
    def model(self): return torch.nn.Linear(1, 1)
    def dataset(self): return [torch.ones(1)] * 64
    def loss(self, model, batch): return model(batch).mean()

"""
FIRST_LINE = WORKLOAD.count("\n") + 1


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A file for a script; what it imports is forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path / "script_of_a_user.py"
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("torch.ones(1, requires_grad=True).sum().backward()", "trains while it is imported"),
        ("torch.autograd.backward(torch.ones((), requires_grad=True))", "trains while it is imported"),
        ("multiprocessing.get_context('spawn').Process(target=print).start()", "starts a process by spawn"),
        ("multiprocessing.get_context('forkserver').Process(target=print).start()", "starts a process by forkserver"),
        ("raise SystemExit(3)", r"exits Python \(SystemExit: 3\)"),
    ],
)
def test_what_only_a_script_does_is_refused_with_its_line(script: Path, code: str, said: str) -> None:
    script.write_text(f"{WORKLOAD}{code}\n")
    with pytest.raises(
        WorkloadRejectedError, match=rf"{script}, line {FIRST_LINE}, {said}.*`if __name__ == \"__main__\":`"
    ):
        load_workload(f"{script}:Line")


def test_a_module_beside_it_that_trains_is_named(script: Path) -> None:
    script.with_name("beside_it.py").write_text("import torch\ntorch.ones(1, requires_grad=True).sum().backward()\n")
    script.write_text(f"{WORKLOAD}import beside_it\n")
    with pytest.raises(WorkloadRejectedError, match=r"beside_it\.py, line 2, trains"):
        load_workload(f"{script}:Line")


def test_a_guarded_script_loads_and_trains_afterwards(script: Path) -> None:
    script.write_text(f'{WORKLOAD}if __name__ == "__main__":\n    raise SystemExit\n')
    workload = load_workload(f"{script}:Line")
    workload.loss(workload.model(), torch.ones(1)).backward()


def test_a_statement_that_takes_long_is_named_once_while_it_runs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "SLOW_S", 0.02)
    monkeypatch.setattr(importing, "SAMPLE_S", 0.01)
    script.write_text(f"{WORKLOAD}import __main__\nwhile not __main__.told: time.sleep(0.001)\n")
    main, told = sys.modules["__main__"], list[str]()
    monkeypatch.setattr(main, "told", told, raising=False)
    load_workload(f"{script}:Line", told.append)
    assert [text.partition(",")[0] for text in told] == [f"still importing {script}"]
    assert f"line {FIRST_LINE + 1}" in told[0]
