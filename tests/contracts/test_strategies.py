"""Contracts of every entry of `STRATEGIES`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from builders import sample_breakdown, sample_environment, sample_hardware, sample_topology
from msgspec.structs import replace
from tiny_workloads import NUM_SAMPLES, Everything, Products, TinyViT

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import ChoiceError
from steptune.tuner.hardware import find_compiler
from steptune.tuner.records import (
    Calibration,
    Candidate,
    Choice,
    DatasetFacts,
    Device,
    Environment,
    ModelFacts,
    Numerics,
    OptimizerFacts,
    SampleUnit,
    ScriptFacts,
    WorkloadFacts,
)
from steptune.tuner.scripts.agent.changes import KNOWN
from steptune.tuner.strategies import STRATEGIES, Strategy, Supported, Unsupported, strategy_named
from steptune.tuner.strategies.api import FP32_ROUNDOFF, NeedsWorkload, Way
from steptune.tuner.strategies.combine import make_plan, normalise
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import LoaderArguments, Plan
from steptune.tuner.workloads.workload import Workload

NUM_STEPS = 3
SCRIPT = ScriptFacts(
    command=("python", "train.py"),
    folder="/home/me",
    loader="DataLoader",
    loader_number=0,
    optimizers=("AdamW",),
    optimizer_numbers=(0,),
    models=("Sequential",),
)
CPU = Environment(
    hardware=sample_hardware(
        devices=(Device(kind="cpu", name="Some Processor", memory_bytes=16 << 30),), num_cores=2, links={}
    ),
    calibration=Calibration(matmul_flops_per_s={"float32": 1e11, "bfloat16": 1e10}, copy_bytes_per_s=1e10),
    compiler="/usr/bin/g++",
    free_disk_bytes=10**12,
    free_memory_bytes=10**11,
)
CUDA = sample_environment("cuda")
ONE_GPU = replace(CUDA, num_ranks=1)
EVERYTHING = WorkloadFacts(
    reference="tiny_workloads:Everything",
    name="Everything",
    signature="",
    global_batch=Everything.global_batch,
    sample_unit=SampleUnit.SAMPLE,
    dataset=DatasetFacts(
        kind="map", length=NUM_SAMPLES, sample_bytes=776, sample_ns=1000, deterministic=True, splits=False
    ),
    model=ModelFacts(
        num_parameters=sum(p.numel() for p in TinyViT().parameters()),
        parameter_bytes=4 * sum(p.numel() for p in TinyViT().parameters()),
        num_parameter_tensors=len(list(TinyViT().parameters())),
        module_types={"Conv2d": 1, "Linear": 5, "LayerNorm": 3},
        num_blocks=2,
        uses_attention=True,
        flops_per_step=10**6,
        unaligned_linears={"8": 1, "64": 0},
        unaligned_flops={"8": 0.01, "64": 0.0},
    ),
    optimizer=OptimizerFacts(
        name="AdamW",
        module="torch.optim.adamw",
        implementation="for_loop",
        implementations=("for_loop", "foreach", "fused"),
        capturable=True,
    ),
    max_global_batch=Everything.max_global_batch,
    sampling="sampler",
)
DEFAULTS: dict[str, Choice] = {s.name: dict(s.defaults) for s in STRATEGIES}
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
CLUSTER = replace(CUDA, num_ranks=4, num_hosts=2, topology=sample_topology())
each_environment = pytest.mark.parametrize("environment", [CPU, CUDA, CLUSTER], ids=["cpu", "cuda", "cluster"])


def legal_choices() -> list[Any]:
    """Choices that can be tried on a CPU and differ from today.

    Compiling needs a compiler on this machine. Of the loaders, which differ in numbers only, two are run.
    """
    cases = []
    for strategy in STRATEGIES:
        for choice in strategy.choices(CPU, EVERYTHING):
            if choice == strategy.neutral(EVERYTHING):
                continue
            if strategy.supports(choice, CPU, EVERYTHING) != Supported():
                continue
            marks = []
            if strategy.name == "data_loading":
                if choice["num_workers"] not in (2, 4) or choice["prefetch_factor"] != 2:
                    continue
                marks = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]
            if strategy.name == "compile":
                # torch warns of itself when it compiles for the first time.
                marks = [
                    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
                    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
                    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
                ]
            label = "-".join(str(value) for value in choice.values())
            cases.append(pytest.param(strategy, choice, id=f"{strategy.name}-{label}", marks=marks))
    return cases


each_legal_choice = pytest.mark.parametrize(("strategy", "choice"), legal_choices())


@each
class TestDeclaration:
    def test_is_named_as_its_folder(self, strategy: Strategy) -> None:
        assert type(strategy).__module__ == f"steptune.tuner.strategies.{strategy.name}.strategy"

    def test_the_name_leads_back_to_it(self, strategy: Strategy) -> None:
        """So names are unique too."""
        assert strategy_named(strategy.name) is strategy

    def test_says_what_it_does(self, strategy: Strategy) -> None:
        """A line for lists, and a page's worth in the module, with where it is from."""
        assert strategy.summary
        assert "\n" not in strategy.summary
        page = sys.modules[type(strategy).__module__].__doc__ or ""
        for part in (f"{strategy.name}:", "Helps:" if "Helps:" in page else "helps", "Numerics:"):
            assert part in page

    def test_attacks_and_touches_known_categories(self, strategy: Strategy) -> None:
        assert set(strategy.attacks) <= set(Category)
        assert strategy.touches is None or set(strategy.attacks) <= set(strategy.touches) <= set(Category)

    def test_has_a_reason_to_be_tried(self, strategy: Strategy) -> None:
        assert strategy.attacks or strategy.memory
        assert 0 < strategy.usual_realisation <= 1
        assert strategy.exchange_realisation is None or 0 < strategy.exchange_realisation <= 1
        assert strategy.trial_cost_s >= 0

    def test_says_how_each_choice_is_applied_in_a_foreign_loop(self, strategy: Strategy) -> None:
        """Names changes that the hooks in a script know, in words of a user, or the reason to need a Workload."""
        for choice in (*strategy.choices(CUDA, EVERYTHING), *strategy.choices(CPU, EVERYTHING)):
            outside = strategy.outside(choice, SCRIPT)
            if isinstance(outside, NeedsWorkload):
                assert outside.reason
                continue
            assert outside.words or choice == strategy.neutral(EVERYTHING)
            assert outside.at in ("", "loader", "optimizer", "model")
            assert set(outside.changes) <= set(KNOWN)
            variables = strategy.environment_variables(choice)
            assert outside.changes or variables or choice == strategy.neutral(EVERYTHING)
            assert not variables or outside.way is Way.START

    def test_says_which_values_each_parameter_may_have(self, strategy: Strategy) -> None:
        assert strategy.values.keys() == strategy.defaults.keys()
        strategy.check(strategy.defaults)

    def test_what_plain_pytorch_runs_asks_for_nothing(self, strategy: Strategy) -> None:
        plan = Plan()
        strategy.contribute(plan, strategy.defaults)
        nothing = Plan(loader=LoaderArguments(prefetch_factor=plan.loader.prefetch_factor))
        assert plan == nothing
        assert plan.loader.capacity == 0
        assert strategy.environment_variables(strategy.defaults) == {}


@each_environment
@each
class TestChoices:
    def test_are_complete_distinct_and_allowed(self, strategy: Strategy, environment: Environment) -> None:
        choices = strategy.choices(environment, EVERYTHING)
        assert choices
        assert len({msgspec.json.encode(choice, order="deterministic") for choice in choices}) == len(choices)
        for choice in choices:
            assert choice.keys() == strategy.defaults.keys()
            strategy.check(choice)

    def test_are_the_same_candidate_after_a_round_trip(self, strategy: Strategy, environment: Environment) -> None:
        for choice in strategy.choices(environment, EVERYTHING):
            candidate = normalise(Candidate(choices={strategy.name: choice}), EVERYTHING)
            for module in (msgspec.json, msgspec.msgpack):
                again = module.decode(module.encode(candidate), type=Candidate)
                assert again == candidate
                assert again.key == candidate.key

    def test_differ_from_today_as_they_are_completed(self, strategy: Strategy, environment: Environment) -> None:
        for choice in strategy.choices(environment, EVERYTHING):
            assert strategy.complete(strategy.difference(choice, EVERYTHING), EVERYTHING) == choice

    def test_are_rated(self, strategy: Strategy, environment: Environment) -> None:
        for choice in strategy.choices(environment, EVERYTHING):
            assert strategy.numerics(choice) in Numerics
            assert FP32_ROUNDOFF <= strategy.unit_roundoff(choice) <= 2.0**-8
            variables = strategy.environment_variables(choice)
            assert all(isinstance(value, str) for value in variables.values())

    def test_save_no_more_than_the_step(self, strategy: Strategy, environment: Environment) -> None:
        shares = dict.fromkeys(Category, 1_000_000)
        breakdown = sample_breakdown(
            categories=shares, step_time_ns=sum(shares.values()), rescaled={}, unprofiled_step_time_ns=None
        )
        situation = Situation(breakdown=breakdown, workload=EVERYTHING, environment=environment, choices=dict(DEFAULTS))
        for choice in strategy.choices(environment, EVERYTHING):
            assert 0.0 <= strategy.bound(situation, choice) <= 1.0

    def test_those_unsupported_say_why_in_one_line(self, strategy: Strategy, environment: Environment) -> None:
        for choice in strategy.choices(environment, EVERYTHING):
            support = strategy.supports(choice, environment, EVERYTHING)
            if isinstance(support, Unsupported):
                assert support.reason
                assert "\n" not in support.reason

    def test_what_runs_today_is_supported(self, strategy: Strategy, environment: Environment) -> None:
        assert strategy.supports(strategy.neutral(EVERYTHING), environment, EVERYTHING) == Supported()


class TestUnknown:
    def test_a_strategy_names_those_that_exist(self) -> None:
        with pytest.raises(ChoiceError, match=r"'warp_drive'.*data_loading, .*micro_batch"):
            strategy_named("warp_drive")

    @each
    def test_a_parameter_names_those_that_exist(self, strategy: Strategy) -> None:
        with pytest.raises(ChoiceError, match=f"{strategy.name} has no parameter 'colour' .*'blue'") as raised:
            strategy.check({"colour": "blue"})
        assert all(name in str(raised.value) for name in strategy.defaults)

    @each
    def test_a_value_names_those_that_are_allowed(self, strategy: Strategy) -> None:
        for name, allowed in strategy.values.items():
            with pytest.raises(ChoiceError, match=f"{strategy.name} has no {name} 'warp'") as raised:
                strategy.check({name: "warp"})
            singles = [value for value in allowed if not isinstance(value, range)]
            assert all(repr(value) in str(raised.value) for value in singles)

    @pytest.mark.parametrize("value", [-1, 10**9, True, 2.0, "2", None])
    def test_a_count_is_a_whole_number_in_range(self, value: Any) -> None:
        with pytest.raises(ChoiceError, match="a whole number from 0 to 1024"):
            strategy_named("data_loading").check({"num_workers": value})

    def test_a_number_is_no_switch(self) -> None:
        """1 equals True, but would make another hash of the same choice."""
        with pytest.raises(ChoiceError, match="it may be False, True"):
            strategy_named("data_loading").check({"pin_memory": 1})


def changed(**parts: Any) -> WorkloadFacts:
    """The tiny workload with some facts otherwise: `model={"num_blocks": 0}`."""
    return replace(
        EVERYTHING,
        **{
            name: replace(getattr(EVERYTHING, name), **value) if isinstance(value, dict) else value
            for name, value in parts.items()
        },
    )


UNSUPPORTED = [
    ("data_loading", {"pin_memory": True}, CPU, EVERYTHING, "requires a CUDA device"),
    ("data_loading", {"num_workers": 2}, CPU, changed(dataset={"kind": "iterable"}), "map-style"),
    ("dataset_cache", {"where": "memory"}, CPU, changed(dataset={"kind": "iterable", "length": None}), "iterable"),
    ("dataset_cache", {"where": "disk"}, CPU, changed(dataset={"deterministic": False}), r"load\(index\)"),
    (
        "dataset_cache",
        {"where": "memory"},
        CPU,
        changed(dataset={"sample_bytes": 10**10}),
        "320.0 GB .* 100.0 GB are free",
    ),
    ("cpu_threads", {"bind": "close"}, CUDA, EVERYTHING, "requires training on the CPU"),
    ("backend_flags", {"tf32": True}, CPU, EVERYTHING, "requires a CUDA device"),
    ("backend_flags", {"cudnn_benchmark": True}, CPU, EVERYTHING, "requires a CUDA device"),
    ("backend_flags", {"cudnn_benchmark": True}, CUDA, changed(model={"module_types": {}}), "requires a convolution"),
    ("backend_flags", {"cudnn_benchmark": True}, CUDA, changed(varying_shapes=True), "batches of one shape"),
    ("precision", {"level": "tf32"}, CPU, EVERYTHING, "requires a CUDA device"),
    ("precision", {"level": "O1", "dtype": "float16"}, CPU, EVERYTHING, "requires a CUDA device"),
    (
        "precision",
        {"level": "fp32", "dtype": "bfloat16"},
        CPU,
        EVERYTHING,
        "fp32 cannot be combined with dtype bfloat16",
    ),
    ("memory_format", {"layout": "channels_last"}, CPU, changed(model={"module_types": {}}), "requires a Conv2d"),
    ("attention_backend", {"backend": "efficient"}, CPU, EVERYTHING, "requires a CUDA device"),
    ("attention_backend", {"backend": "cudnn"}, CPU, EVERYTHING, "requires a CUDA device"),
    ("attention_backend", {"backend": "math"}, CPU, changed(model={"uses_attention": False}), "does not call"),
    ("compile", {"mode": "default"}, replace(CPU, compiler=None), EVERYTHING, r"install g\+\+ or clang\+\+"),
    ("compile", {"mode": "reduce-overhead"}, CPU, EVERYTHING, "requires a CUDA device"),
    ("compile", {"mode": "max-autotune"}, CPU, EVERYTHING, "requires a CUDA device"),
    ("compile", {"mode": "default", "scope": "regional"}, CPU, changed(model={"num_blocks": 0}), "Workload.blocks"),
    ("optimizer_implementation", {"implementation": "for_loop"}, CPU, EVERYTHING, "already the "),
    ("cuda_graph", {"scope": "step"}, CPU, EVERYTHING, "requires a CUDA device"),
    ("cuda_graph", {"scope": "step"}, CUDA, EVERYTHING, "single rank"),
    ("cuda_graph", {"scope": "step"}, ONE_GPU, changed(custom_step=True), "training_step"),
    ("cuda_graph", {"scope": "step"}, ONE_GPU, changed(varying_shapes=True), "batches of one shape"),
    (
        "cuda_graph",
        {"scope": "step"},
        ONE_GPU,
        changed(optimizer={"name": "Lion", "capturable": False}),
        "Lion does not support capturable=True",
    ),
    (
        "optimizer_implementation",
        {"implementation": "fused"},
        CPU,
        changed(optimizer={"name": "LBFGS", "implementations": ()}),
        r"LBFGS has no fused implementation \(it has: none\)",
    ),
    (
        "optimizer_implementation",
        {"contiguous": True},
        CPU,
        changed(optimizer={"name": "Muon"}),
        "Muon needs per-parameter shapes or norms",
    ),
    (
        "optimizer_implementation",
        {"contiguous": True},
        CPU,
        changed(optimizer={"name": "AdamW", "module": "mine.adamw"}),
        "is not known to be one",
    ),
    ("optimizer_implementation", {"contiguous": True}, CPU, changed(custom_step=True), "training_step"),
    ("optimizer_algorithm", {"algorithm": "adamw"}, CPU, EVERYTHING, "already the workload"),
    ("larger_global_batch", {"factor": 4}, CPU, EVERYTHING, "a global batch of 32 exceeds .* .16."),
    (
        "larger_global_batch",
        {"factor": 2},
        CPU,
        changed(max_global_batch=None),
        "requires Workload.max_global_batch: set it",
    ),
    (
        "larger_global_batch",
        {"factor": 2},
        CPU,
        changed(dataset={"length": 15}),
        "has only 15 samples; the batch needs 16",
    ),
    (
        "larger_global_batch",
        {"factor": 2},
        CPU,
        changed(dataset={"kind": "iterable", "length": None}, varying_shapes=True),
        "cannot concatenate",
    ),
    ("larger_global_batch", {"factor": 2}, CPU, changed(custom_step=True), "training_step"),
    ("ddp_buckets", {"bucket_views": True}, CPU, EVERYTHING, "requires more than one rank"),
    ("ddp_buckets", {"bucket_cap_mb": 5, "first_bucket_mb": 6}, CUDA, EVERYTHING, "must not exceed bucket_cap_mb"),
    ("ddp_buckets", {"bucket_cap_mb": 50}, CUDA, EVERYTHING, "all gradients already fit"),
    (
        "ddp_buckets",
        {"bucket_cap_mb": 200},
        CUDA,
        changed(model={"parameter_bytes": 90 << 20}),
        "already fit into buckets of 100 MiB",
    ),
    ("ddp_buckets", {"static_graph": True}, CUDA, changed(custom_step=True), "training_step"),
    (
        "ddp_buckets",
        {"bucket_views": True},
        CUDA,
        replace(changed(model={"num_unused_parameters": 3}), current={"ddp_buckets": {"find_unused": True}}),
        "3 parameters get no gradient",
    ),
    ("gradient_compression", {"method": "bf16"}, CPU, EVERYTHING, "requires more than one rank"),
    ("gradient_compression", {"method": "dgc"}, CUDA, EVERYTHING, "torch.optim.SGD, got AdamW"),
    (
        "gradient_compression",
        {"method": "dgc"},
        CUDA,
        changed(optimizer={"name": "SGD", "module": "torch.optim.sgd"}, custom_step=True),
        "training_step",
    ),
    ("hierarchical_allreduce", {"levels": 2}, CUDA, EVERYTHING, "all ranks are on one host"),
    ("nccl_settings", {"algorithm": "tree"}, ONE_GPU, EVERYTHING, "requires more than one rank"),
    ("nccl_settings", {"algorithm": "tree"}, replace(CPU, num_ranks=2), EVERYTHING, "requires a CUDA device"),
    (
        "nccl_settings",
        {"socket_threads": 4, "sockets_per_thread": 4},
        CUDA,
        EVERYTHING,
        "at least 2 hosts, got 1: ranks on one host",
    ),
    (
        "nccl_settings",
        {"socket_threads": 16, "sockets_per_thread": 5},
        replace(CUDA, num_hosts=2),
        EVERYTHING,
        "16 threads with 5 sockets each exceed NCCL's limit of 64",
    ),
    (
        "nccl_settings",
        {"min_channels": 8, "max_channels": 4},
        CUDA,
        EVERYTHING,
        "min_channels .8. exceeds max_channels .4.",
    ),
    ("nccl_settings", {"protocol": "own"}, CUDA, EVERYTHING, "NCCL_PROTO is not set"),
    (
        "nccl_settings",
        {"protocol": "ll"},
        CUDA,
        replace(EVERYTHING, current={"nccl_settings": {"algorithm": "ring"}}),
        "NCCL_ALGO is already set",
    ),
    ("model_recipe", {"pad_multiple": 64}, CPU, EVERYTHING, "no linear layer needs padding to 64"),
    ("model_recipe", {"pad_multiple": 8}, CPU, changed(model={"unaligned_linears": {}}), "are multiples of 8"),
    ("model_recipe", {"pooled_classifier": True}, CPU, EVERYTHING, "Workload.class_token"),
    ("length_balancing", {"pool_batches": 16}, CPU, changed(dataset={"kind": "iterable"}), "its own order"),
    (
        "length_balancing",
        {"pool_batches": 16},
        CPU,
        changed(sampling="batch_sampler"),
        "custom batch_sampler, which decides",
    ),
    ("length_balancing", {"pool_batches": 16}, replace(CPU, num_ranks=2), EVERYTHING, "or one rank's part"),
    ("length_balancing", {"pool_batches": 16}, CPU, EVERYTHING, "implement Workload.length"),
    (
        "length_balancing",
        {"pool_batches": 16},
        CPU,
        changed(dataset={"padding_share": 0.0}),
        "no inspected batch has padding",
    ),
    (
        "length_balancing",
        {"pool_batches": 64},
        CPU,
        changed(dataset={"padding_share": 0.4}, sample_step_ns=10**9),
        "at most 10 s, got 64 s",
    ),
    ("activation_checkpointing", {"every": 1}, CPU, changed(model={"num_blocks": 0}), "Workload.blocks"),
    ("fused_kernels", {"window_attention": True}, CUDA, EVERYTHING, "window_attention: the model was not inspected"),
    (
        "fused_kernels",
        {"window_attention": True},
        CUDA,
        changed(
            model={"kernel_refusals": {"window_attention": "the model contains no part that this kernel computes"}}
        ),
        "window_attention: the model contains no part that this kernel computes",
    ),
    (
        "fused_kernels",
        {"window_attention": True},
        CPU,
        changed(model={"kernel_refusals": {"window_attention": ""}}),
        "requires a CUDA device",
    ),
    ("moe_experts", {"execution": "batched"}, CPU, EVERYTHING, r"requires batched experts; the model has no mixture"),
    (
        "moe_experts",
        {"execution": "looped"},
        CPU,
        changed(model={"expert_implementations": ("looped", "batched"), "expert_implementation": "looped"}),
        "already the ",
    ),
    ("activation_compression", {"kept_as": "relu_mask"}, CPU, EVERYTHING, "requires a ReLU module"),
    ("allocator", {"expandable_segments": True}, CPU, EVERYTHING, "requires a CUDA device"),
    ("device_prefetch", {"ahead": True}, CPU, EVERYTHING, "requires a CUDA device"),
    ("device_prefetch", {"ahead": True, "as_bytes": True}, CUDA, EVERYTHING, "Workload.byte_dataset"),
    ("memory_format", {"batch_second": True}, CPU, EVERYTHING, "batch_first=True"),
    ("micro_batch", {"num_micro_batches": 2}, CPU, changed(custom_step=True), "training_step"),
    ("micro_batch", {"num_micro_batches": 2}, CPU, changed(batch_splittable=False), "share their first dimension"),
    ("micro_batch", {"num_micro_batches": 2}, CPU, changed(model={"has_batch_statistics": True}), "batch norm"),
    (
        "activation_checkpointing",
        {"every": 1},
        CPU,
        changed(model={"block_state": "average"}),
        "blocks change average in the forward pass",
    ),
]


@pytest.mark.parametrize(
    ("name", "difference", "environment", "workload", "reason"),
    UNSUPPORTED,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(UNSUPPORTED)],
)
def test_what_cannot_be_tried_gives_the_reason(
    name: str, difference: Choice, environment: Environment, workload: WorkloadFacts, reason: str
) -> None:
    strategy = strategy_named(name)
    support = strategy.supports({**strategy.defaults, **difference}, environment, workload)
    assert isinstance(support, Unsupported)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(support.reason)


# --- running --------------------------------------------------------------------------------------


def restore_process(num_threads: int = 1) -> None:
    """Settings of the whole process as in a fresh rank. One thread is enough for models this small."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of the whole process as a fresh rank has them, and as they were afterwards."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    restore_process()
    yield
    restore_process()
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Observations of a few steps of a job."""

    losses: list[float]
    evidence: dict[str, dict[str, Any]]


def run(workload: Workload, choices: dict[str, Choice], directory: Path) -> Run:
    """Builds a job and trains it, as a rank does."""
    workload.directory = directory
    torch.manual_seed(0)
    job = assemble(workload, make_plan(choices), device=torch.device("cpu"))
    batches = list(job)[:NUM_STEPS]
    losses = [float(job.step(batch)) for batch in batches[:-1]]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses.append(float(job.step(batches[-1])))
    operators = tuple(event.key for event in profile.key_averages())
    return Run(losses=losses, evidence={s.name: {**s.evidence(job), "operators": operators} for s in STRATEGIES})


@pytest.mark.usefixtures("clean_process")
class TestRunning:
    @each_legal_choice
    def test_trains_as_its_numerics_say_and_shows_that_it_took_effect(
        self, strategy: Strategy, choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tolerance is some hundred roundings of a loss near one; a lossy choice need only train.

        `exact` is bit for bit. Loader choices feed the same samples, so here they are too.
        """
        for name, value in strategy.environment_variables(choice).items():
            monkeypatch.setenv(name, value)
        num_threads = 2 if strategy.name == "cpu_threads" else 1
        # All modules of Products are torch's own, in whose code TorchDynamo by itself begins no graph.
        workload = Products() if strategy.name == "compile" else Everything()
        restore_process(num_threads)
        tried = run(workload, {**DEFAULTS, strategy.name: choice}, tmp_path)

        assert all(math.isfinite(loss) for loss in tried.losses)
        if choice.get("bind") is None:  # which a process has from its beginning (test_worker_threads)
            effect = strategy.took_effect(tried.evidence[strategy.name], choice)
            assert effect.strategy == strategy.name
            assert effect.took, effect.detail
        restore_process(num_threads)
        plain = run(workload, DEFAULTS, tmp_path)
        if strategy.numerics(choice) in (Numerics.EXACT, Numerics.SAMPLING):
            assert tried.losses == plain.losses
        elif strategy.numerics(choice) is Numerics.ROUNDING:
            assert tried.losses == pytest.approx(plain.losses, rel=200 * strategy.unit_roundoff(choice), abs=0)

    def test_a_choice_that_was_not_carried_out_is_noticed(self, tmp_path: Path) -> None:
        """Today's job, asked for the effect of every choice; flash attention is what it runs anyway."""
        restore_process(num_threads=2)
        plain = run(Everything(), DEFAULTS, tmp_path)
        for case in legal_choices():
            strategy, choice = case.values
            effect = strategy.took_effect(plain.evidence[strategy.name], choice)
            assert effect.took == (choice == {"backend": "flash"}), case.id
            assert effect.detail

    @each_legal_choice
    def test_a_setting_without_its_effect_is_noticed(
        self, strategy: Strategy, choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Today's training, of which plan and environment say that it is the choice's: who reads back what was set is
        taken in.
        """
        if choice == {"backend": "flash"}:
            return  # today's training runs it
        restore_process(num_threads=2)
        workload = Everything()
        workload.directory = tmp_path
        torch.manual_seed(0)
        job = assemble(workload, make_plan(DEFAULTS), device=torch.device("cpu"))
        batches = list(job)[:2]
        job.step(batches[0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            job.step(batches[1])
        for name, value in strategy.environment_variables(choice).items():
            monkeypatch.setenv(name, value)
        job.plan = make_plan({**DEFAULTS, strategy.name: choice})
        operators = tuple(event.key for event in profile.key_averages())
        effect = strategy.took_effect({**strategy.evidence(job), "operators": operators}, choice)
        assert not effect.took, effect.detail

    def test_what_plain_pytorch_runs_took_effect(self, tmp_path: Path) -> None:
        plain = run(Everything(), DEFAULTS, tmp_path)
        for strategy in STRATEGIES:
            effect = strategy.took_effect(plain.evidence[strategy.name], strategy.defaults)
            assert effect.took, (strategy.name, effect.detail)


def test_the_facts_used_here_are_those_of_the_workload(tmp_path: Path) -> None:
    """Or the choices above would be legal on paper only."""
    from steptune.tuner.trials.inspection import InspectRequest, inspect_workload

    class Ignored:
        def send(self, message: Any) -> None:
            pass

    request = InspectRequest(workload="tiny_workloads:Everything", study_directory=str(tmp_path))
    found = inspect_workload(request, 0, 1, Ignored())  # type: ignore[arg-type]
    assert found.model.module_types["Conv2d"] == 1
    for part, names in {
        "model": (
            "num_parameters",
            "parameter_bytes",
            "num_parameter_tensors",
            "num_blocks",
            "uses_attention",
            "unaligned_linears",
        ),
        "dataset": ("kind", "length", "deterministic", "sample_bytes"),
        "optimizer": ("name", "implementation", "implementations", "capturable"),
    }.items():
        for name in names:
            assert getattr(getattr(found, part), name) == getattr(getattr(EVERYTHING, part), name), name
    assert (found.max_global_batch, found.sampling) == (EVERYTHING.max_global_batch, EVERYTHING.sampling)
    assert found.batch_splittable
    assert not found.varying_shapes
    assert found.host_read == ""
