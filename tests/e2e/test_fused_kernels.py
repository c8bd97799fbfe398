"""Kernels that another package registers by the entry point are offered, searched and guarded as ours."""

import pytest
from command import PATIENT, ROOT, Steptune

pytestmark = pytest.mark.xdist_group("fused_kernels")

PACKAGE = ROOT / "tests" / "workloads" / "other_package"
VARIABLES = {"PYTHONPATH": f"{ROOT / 'src'}:{PACKAGE}"}
WORKLOAD = f"{PACKAGE / 'other_package.py'}:Layers"


@pytest.fixture(scope="module")
def steptune(tmp_path_factory):
    return Steptune(tmp_path_factory.mktemp("fused_kernels"))


@pytest.fixture(scope="module")
def recommendation(steptune):
    arguments = ("--only", "fused_kernels", "--trials", "14", "--budget", "3m", "--device", "cpu", *PATIENT)
    return steptune("tune", WORKLOAD, *arguments, "--output", "results", "--json", variables=VARIABLES).json


@pytest.fixture
def rows(steptune, recommendation):
    rows = steptune("show", "--json", variables=VARIABLES).json["decisions"]
    return [row for row in rows if row["moves"]]


def switched_on(row):
    return {name for move in row["moves"] for name, value in move["choice"].items() if value}


def test_the_kernel_that_is_right_is_recommended_under_the_guard(recommendation):
    assert recommendation["candidate"]["choices"] == {"fused_kernels": {"right_affine": True}}
    assert recommendation["guard"]["passed"]
    assert recommendation["verdict"] == "faster"


def test_one_that_computes_something_else_is_rejected_by_the_guard(rows):
    verdicts = {row["verdict"] for row in rows if "wrong_affine" in switched_on(row)}
    assert "guard_rejected" in verdicts
    assert not verdicts & {"accepted", "confirmed", "no_gain"}


def test_one_without_a_use_in_the_model_is_refused_in_words(rows):
    [row] = [row for row in rows if switched_on(row) == {"window_attention"}]
    assert row["verdict"] == "not_tried"
    assert "the model contains no part that this kernel computes (Swin's shifted-window attention" in row["reason"]


def test_strategies_list_them(steptune):
    rows = steptune("strategies", "-w", WORKLOAD, "--json", variables=VARIABLES).json
    [row] = [row for row in rows if row["name"] == "fused_kernels"]
    assert {name for choice in row["choices"] for name in choice["choice"]} >= {"right_affine", "wrong_affine"}
