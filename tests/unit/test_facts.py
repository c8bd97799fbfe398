"""Settings that a trace says are already on, and where it is silent; stalls, which are no dispatch."""

from pathlib import Path

import pytest
from trace_events import Event, copy, event, kernel, launched, note, operator, runtime, step, trace_of
from traces import needs_traces, trace_file

from steptune.tuner.profiling.analysis import analyse_rank, analyse_trace
from steptune.tuner.profiling.facts import OWN_MARK, already_on, joined_facts
from steptune.tuner.profiling.gains import REPLAY_MARGIN
from steptune.tuner.records import Breakdown, StepFacts
from steptune.tuner.strategies.step_facts import step_facts

CAPTURES = Path(__file__).resolve().parents[1] / "captures"
A100 = {"id": 0, "name": "NVIDIA A100", "computeMajor": 8, "computeMinor": 0, "totalGlobalMem": 1}
V100 = {"id": 0, "name": "Tesla V100", "computeMajor": 7, "computeMinor": 0, "totalGlobalMem": 1}
P100 = {"id": 0, "name": "Tesla P100", "computeMajor": 6, "computeMinor": 0, "totalGlobalMem": 1}
MI210 = {"id": 0, "name": "AMD Instinct MI210", "computeMajor": 9, "computeMinor": 0, "totalGlobalMem": 1}
APEX = "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>, float, float>(long)"
TORCH_FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<float>>"
)
TORCH_FUSED = (
    "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4, (ADAM_MODE)1>>"
)


def breakdown_in(folder: Path, events: list[Event], *devices: dict) -> Breakdown:
    trace = trace_of(folder, [step(1, 0, 1000), *events], **({"deviceProperties": list(devices)} if devices else {}))
    return analyse_trace(trace, "trace.json")[0].breakdowns[0]


def facts_in(folder: Path, events: list[Event], *devices: dict) -> StepFacts:
    return breakdown_in(folder, events, *devices).facts


def matmul(name: str) -> list[Event]:
    return [operator("aten::mm", 1, 9), *launched(name, 2, 10, 100, 1)]


@pytest.mark.parametrize(
    "name",
    ["Torch-Compiled Region: 0/1", "CompiledFunction", "## Call CompiledFxGraph fabc ##", "triton_poi_fused_gelu_1"],
)
def test_whatever_only_torch_compile_leaves_says_that_it_is_on(tmp_path, name):
    """A regional compilation compiles some blocks only: it is on as well."""
    assert facts_in(tmp_path, [operator(name, 1, 5), operator("aten::mm", 6, 9)]).compiled
    assert not facts_in(tmp_path, [operator("aten::mm", 6, 9)]).compiled


def test_kernels_written_in_triton_are_no_compilation(tmp_path):
    assert not facts_in(tmp_path, launched("_layer_norm_fwd_fused", 2, 10, 100, 1)).compiled


def test_a_graph_launch_is_a_graph(tmp_path):
    events = [runtime("cudaGraphLaunch", 1, 2, 1), kernel("ampere_sgemm", 5, 9, 1)]
    assert facts_in(tmp_path, events).cuda_graphs
    assert not facts_in(tmp_path, launched("ampere_sgemm", 1, 5, 9, 1)).cuda_graphs


@pytest.mark.parametrize(
    ("mark", "inside", "expected"),
    [
        ("AdamW", [operator("aten::_fused_adamw_", 20, 25), operator("aten::_foreach_add_", 15, 17)], "fused"),
        ("AdamW", launched(TORCH_FUSED, 20, 30, 40, 9), "fused"),
        ("FusedAdam", launched(APEX, 20, 30, 40, 9), "fused"),
        ("DeepSpeedCPUAdam", [operator("aten::copy_", 20, 25)], "fused"),
        ("AdamW", launched("triton_for_fused_0", 20, 30, 40, 9), "fused"),
        ("SGD", launched(TORCH_FOREACH, 20, 30, 40, 9), "foreach"),
        ("SGD", [operator("aten::_foreach_add_", 20, 25)], "foreach"),
        ("Adam", [operator("aten::addcdiv_", 20, 25)], "for_loop"),
        ("Adam", [], ""),
    ],
)
def test_the_optimizer_s_implementation_is_read_from_what_its_step_runs(tmp_path, mark, inside, expected):
    facts = facts_in(tmp_path, [note(f"Optimizer.step#{mark}.step", 10, 30), *inside])
    assert (facts.optimizer, facts.optimizer_name) == (expected, mark)


def test_clipping_gradients_is_no_optimizer(tmp_path):
    """clip_grad_norm_ runs foreach operators outside of the optimizer's step."""
    events = [operator("aten::_foreach_norm", 2, 5), note("Optimizer.step#Adam.step", 10, 30)]
    assert facts_in(tmp_path, [*events, operator("aten::addcmul_", 15, 20)]).optimizer == "for_loop"


def test_in_a_replayed_graph_the_update_is_known_by_its_kernels(tmp_path):
    events = [runtime("cudaGraphLaunch", 1, 2, 1), kernel(TORCH_FUSED, 5, 9, 1)]
    facts = facts_in(tmp_path, events)
    assert (facts.optimizer, facts.optimizer_name) == ("fused", "AdamW")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "workers"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "main process"),
        ("[pl][profile][_TrainingEpochLoop].train_dataloader_next", ""),
    ],
)
def test_the_loader_says_who_loads(tmp_path, name, expected):
    breakdown = breakdown_in(tmp_path, [note(name, 1, 500), *matmul("ampere_sgemm")])
    assert breakdown.facts.loader == expected
    assert "data_wait" in breakdown.categories


def test_most_of_the_bytes_decide_whether_copies_are_pinned_and_beside(tmp_path):
    """A scalar from pageable memory beside a pinned batch changes nothing."""
    events = [
        *matmul("ampere_sgemm"),
        copy("Memcpy HtoD (Pinned -> Device)", 20, 60),
        copy("Memcpy HtoD (Pageable -> Device)", 70, 71),
    ]
    facts = facts_in(tmp_path, events)
    assert (facts.pinned_memory, facts.prefetched) == (True, True)
    pageable = facts_in(tmp_path, [*matmul("ampere_sgemm"), copy("Memcpy HtoD (Pageable -> Device)", 20, 60)])
    assert pageable.pinned_memory is False
    assert facts_in(tmp_path, matmul("ampere_sgemm")).pinned_memory is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ampere_sgemm_128x64_tn", "float32"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>", "float32"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>", "tf32"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32", "tf32"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "bfloat16"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "float16"),
        ("nvjet_qqtst_128x128_128x6_1x2_h_bz_TNT", "float8"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "float16"),
        ("void precomputed_convolve_sgemm<__nv_bfloat16, 128, 6, 7, 3, 3, 5, 1, false>", "bfloat16"),
        ("volta_h884gemm_128x64_ldg8_nn", "float16"),
        ("my_custom_gemm_kernel", ""),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1", "bfloat16"),
        ("triton_tem_fused_mm_3", ""),
    ],
)
def test_the_arithmetic_is_what_a_kernel_s_name_states(tmp_path, name, dtype):
    assert facts_in(tmp_path, matmul(name), A100).matmul_dtype == dtype


def test_recorded_types_come_before_names(tmp_path):
    """A kernel whose name says FP32 among operators whose arguments are bfloat16."""
    typed = event("cpu_op", "aten::mm", 1, 9, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["c10::BFloat16"] * 2})
    events = [typed, *launched("ampere_sgemm_32x128", 2, 10, 100, 1)]
    assert facts_in(tmp_path, events, A100).matmul_dtype == "bfloat16"
    assert facts_in(tmp_path, [typed]).matmul_dtype == "bfloat16", "a CPU"


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        (A100, ("tf32", "bfloat16", "float16")),
        (V100, ("float16",)),
        (P100, ()),
        (MI210, ("bfloat16", "float16")),
        (None, None),
    ],
    ids=["A100", "V100", "P100", "MI210", "unknown"],
)
def test_what_a_device_multiplies_faster_is_known_by_its_architecture(tmp_path, device, dtypes):
    """An MI210 calls itself 9.0, which on NVIDIA is a Hopper."""
    devices = [device] if device else []
    assert facts_in(tmp_path, matmul("some_gemm"), *devices).faster_dtypes == dtypes


def test_rocm_is_known_by_its_calls_where_no_device_is_described(tmp_path):
    events = [runtime("hipLaunchKernel", 1, 2, 1), kernel("Cijk_Ailk_Bljk_SB_MT64x64x16", 5, 9, 1)]
    assert facts_in(tmp_path, events).faster_dtypes == ("bfloat16", "float16")


def test_own_captures_are_known_again(tmp_path):
    assert facts_in(tmp_path, [note(OWN_MARK, 1, 2), *matmul("sgemm")]).own_capture
    assert not facts_in(tmp_path, matmul("sgemm")).own_capture


def test_what_is_on_is_said_in_short_words():
    facts = StepFacts(
        compiled=True,
        optimizer="fused",
        optimizer_name="AdamW",
        matmul_dtype="bfloat16",
        loader="workers",
        num_workers=4,
    )
    assert already_on(facts) == ("torch.compile", "fused AdamW", "bf16", "4 workers")
    assert already_on(StepFacts(optimizer="fused", optimizer_name="FusedAdam")) == ("FusedAdam",)
    assert already_on(StepFacts(loader="workers")) == ("loader workers",)
    assert already_on(StepFacts(optimizer="for_loop", matmul_dtype="float32", loader="main process")) == ()


def test_choices_and_trace_complete_each_other():
    choices = {
        "compile": {"mode": "reduce-overhead"},
        "data_loading": {"num_workers": 3, "pin_memory": True},
        "precision": {"level": "O1", "dtype": None},
    }
    chosen = step_facts(choices)
    assert already_on(chosen) == ("torch.compile", "CUDA graphs", "bf16", "3 workers", "pinned memory")
    facts = joined_facts(StepFacts(optimizer="fused", optimizer_name="SGD", matmul_dtype="float16"), chosen)
    assert (facts.optimizer, facts.matmul_dtype, facts.num_workers) == ("fused", "float16", 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100_compiled", ("torch.compile", "fused AdamW")),
        ("h200_cuda_graph", ("CUDA graphs", "fused AdamW")),
        ("h100_checkpointed", ("fused AdamW", "activation checkpointing")),
        ("h200_copies_beside", ("pinned memory", "prefetch to the device")),
    ],
)
def test_small_captures_say_what_they_use(name, said):
    assert already_on(analyse_rank(CAPTURES / f"{name}.json.gz").breakdowns[0].facts) == said


@needs_traces
@pytest.mark.parametrize(
    ("name", "said", "not_advised"),
    [
        ("h200_swin_t_launch_bound", ("fused AdamW", "bf16"), {"optimizer_implementation", "precision"}),
        ("h200_resnet50_cuda_graph", ("CUDA graphs", "fused AdamW", "bf16"), {"cuda_graph", "precision"}),
        ("hta_ddp_a100_rank0of2_nccl_args", ("foreach SGD", "TF32"), {"precision"}),
        ("hta_job128_rank0", ("foreach Shampoo", "TF32", "pinned memory", "prefetch to the device"), {"precision"}),
    ],
)
def test_real_traces_are_not_advised_what_they_have(name, said, not_advised):
    analysis = analyse_rank(trace_file(name))
    assert already_on(analysis.breakdowns[0].facts) == said
    assert not not_advised & {strategy for finding in analysis.findings for strategy in finding.strategies}


@needs_traces
def test_a_v100_is_not_advised_tf32():
    analysis = analyse_rank(trace_file("kineto_resnet50_v100_workers0"))
    (advice,) = [finding.advice for finding in analysis.findings if finding.rule == "idle_tensor_cores"]
    assert advice.startswith("use FP16 matmuls")


# --- stalls -------------------------------------------------------------------------------------


def paced(num_steps: int, *stalls: tuple[int, int], launches: int = 20) -> list[Event]:
    """Steps of launches every 20 us of kernels of 5 us; (step, microseconds): a stall at the end of that step."""
    lengths = dict(stalls)
    events: list[Event] = []
    at = 0
    for number in range(1, num_steps + 1):
        start = at
        for place in range(launches):
            link = 100 * number + place
            events += launched("ampere_sgemm", at, at + 5, at + 10, link)
            at += 20
        at += lengths.get(number, 0)
        events.append(step(number, start, at))
    return events


def stalls_in(folder: Path, events: list[Event]):
    return analyse_trace(trace_of(folder, events), "trace.json")[0].breakdowns[0].stalls


def test_a_steady_pace_has_no_stall(tmp_path):
    assert stalls_in(tmp_path, paced(5)).idle_ns == 0


def test_a_sleep_in_every_step_is_a_stall_of_every_step(tmp_path):
    found = stalls_in(tmp_path, paced(5, *((number, 20_000) for number in range(1, 6))))
    assert found.steps == (1, 2, 3, 4, 5)
    assert found.idle_ns == pytest.approx(100_000_000, rel=0.01)
    assert found.longest[0].length_ns == pytest.approx(20_000_000, rel=0.01)


def test_a_single_stall_is_of_its_step(tmp_path):
    found = stalls_in(tmp_path, paced(5, (3, 60_000)))
    assert found.steps == (3,)
    analysis, *_ = analyse_trace(trace_of(tmp_path, paced(5, (3, 60_000))), "trace.json")
    rules = {finding.rule: finding for finding in analysis.findings}
    assert rules["host_stall"].evidence["expected"] == pytest.approx(60 / 62, abs=0.01), "its mean share of five steps"
    assert not rules.get("launch_bound") or rules["launch_bound"].bound - REPLAY_MARGIN < 0.05


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("cpu_op", "aten::sort", "aten::sort"),
        ("user_annotation", "checkpoint", "checkpoint"),
        ("python_function", "<built-in function sleep>", "<built-in function sleep>"),
        ("user_annotation", "whole epoch", ""),
    ],
)
def test_a_stall_has_the_name_of_what_covers_most_of_it(tmp_path, kind, name, expected):
    events = paced(2, (1, 20_000))
    low, high = (400 - 300_000, 300_000) if name == "whole epoch" else (600, 20_300)
    found = stalls_in(tmp_path, [*events, event(kind, name, max(0, low), high)])
    assert found.longest[0].name == expected


@pytest.mark.parametrize(
    ("kind", "name", "cause", "advice"),
    [
        ("python_function", "Python GC", "collection", "garbage"),
        ("python_function", "<built-in function collect>", "collection", "garbage"),
        ("python_function", "torch/serialization.py(960): save", "checkpoint", "checkpoints"),
        ("user_annotation", "save_checkpoint", "checkpoint", "checkpoints"),
        ("cpu_op", "CachingAutotuner.benchmark_all_configs", "compilation", "compile before"),
        ("python_function", "torch/_dynamo/convert_frame.py(12): _compile", "compilation", "compile before"),
        ("python_function", "<built-in function sleep>", "lock or sleep", "sleep"),
        ("python_function", "<built-in method acquire of _thread.lock object at 0x7f>", "lock or sleep", "lock"),
        ("user_annotation", "evaluate", "evaluation", "evaluate"),
        ("python_function", "<built-in function print>", "logging", "log"),
        ("overhead", "Buffer Flush", "profiler", "profiler"),
        ("python_function", "train.py(12): retrieve", "", "move this work out"),
        ("python_function", "train.py(12): save_checkpoint", "checkpoint", "checkpoints"),
        ("python_function", "train.py(12): evaluate", "evaluation", "evaluate"),
        ("python_function", "threading.py(637): wait", "lock or sleep", "lock"),
        ("python_function", "torch/_inductor/compile_fx.py(900): compile_fx_inner", "compilation", "compile before"),
        ("user_annotation", "entire_frame_compile (dynamo_timed)", "compilation", "compile before"),
        ("python_function", "logging/__init__.py(1500): info", "logging", "log"),
        # Paths and modules are named after anything; activation checkpointing writes no checkpoint.
        ("python_function", "torch/utils/checkpoint.py(264): forward", "", "move this work out"),
        ("python_function", "torch/utils/checkpoint.py(450): checkpoint", "", "move this work out"),
        ("python_function", "torch/_dynamo/eval_frame.py(655): _fn", "", "move this work out"),
        ("python_function", "nn.Module: Eval_0", "", "move this work out"),
        ("python_function", "my/checkpoint/model.py(5): forward", "", "move this work out"),
        ("python_function", "data/save.py(3): load", "", "move this work out"),
        ("python_function", "re/__init__.py(330): _compile", "", "move this work out"),
    ],
)
def test_a_stall_s_cause_and_advice_follow_from_its_name(tmp_path, kind, name, cause, advice):
    stalls = [(number, 20_000) for number in (1, 2, 3)]
    events = paced(3, *stalls)
    events += [event(kind, name, 20_400 * number + 600, 20_400 * number + 20_300) for number in range(3)]
    analysis, *_ = analyse_trace(trace_of(tmp_path, events), "trace.json")
    finding = next(finding for finding in analysis.findings if finding.rule == "host_stall")
    assert finding.evidence.get("cause", "") == cause
    assert advice in finding.advice


def test_waiting_for_data_or_the_device_is_no_stall(tmp_path):
    """Each has a category of its own; what is left of the silence is too short."""
    loader = note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 400, 20_395)
    assert stalls_in(tmp_path, [*paced(2, (1, 20_000)), loader]).idle_ns == 0
    waits = runtime("cudaStreamSynchronize", 400, 20_395)
    assert stalls_in(tmp_path, [*paced(2, (1, 20_000)), waits]).idle_ns == 0


def test_a_stream_that_waits_for_an_event_keeps_no_host(tmp_path):
    """cudaStreamWaitEvent returns at once: it is no synchronisation of the host."""
    events = [
        *matmul("ampere_sgemm"),
        runtime("cudaStreamWaitEvent", 110, 200),
        *launched("ampere_sgemm", 201, 210, 220, 2),
    ]
    breakdown = breakdown_in(tmp_path, events)
    assert breakdown.categories["synchronisation"] == 0


def test_on_a_cpu_a_stall_is_a_stretch_without_an_operator(tmp_path):
    events = [step(1, 0, 21_000), step(2, 21_000, 42_000)]
    for start in (0, 21_000):
        events += [operator("aten::mm", start + 10 * n, start + 10 * n + 8) for n in range(100)]
    analysis, *_ = analyse_trace(trace_of(tmp_path, events), "trace.json")
    rules = {finding.rule: finding for finding in analysis.findings}
    assert rules["host_stall"].bound == pytest.approx(20 / 21, rel=0.01)
    assert "python_bound" not in rules


class TestClosures:
    """Lightning's optimizers are given the whole training step as a closure."""

    FORWARD_AND_BACKWARD = (
        note("Optimizer.step#AdamW.step", 100, 1000),
        operator("aten::mm", 110, 400),
        operator("autograd::engine::evaluate_function: MmBackward0", 400, 880),
        operator("aten::mm", 410, 800),
        operator("aten::_fused_adamw_", 900, 990),
    )

    def test_the_passes_inside_of_a_step_are_no_update_on_a_cpu(self, tmp_path):
        found = breakdown_in(tmp_path, list(self.FORWARD_AND_BACKWARD))
        shares = {name: round(ns / 1000) for name, ns in found.per_step_ns.items() if ns}
        assert shares == {"compute_matmul": 680, "optimizer": 120, "host": 200}
        assert {name: ns // 1000 for name, ns in found.phases.items() if ns} == {
            "forward": 290,
            "backward": 390,
            "optimizer": 120,
        }

    def test_nor_on_a_device_whose_backward_pass_has_a_thread_of_its_own(self, tmp_path):
        events = [
            note("Optimizer.step#AdamW.step", 100, 1000),
            *launched("gemm_forward", 110, 120, 300, 1),
            operator("autograd::engine::evaluate_function: MmBackward0", 300, 800, 2),
            *launched("gemm_backward", 310, 320, 700, 2, 2),
            *launched(TORCH_FUSED, 900, 905, 955, 3),
        ]
        found = breakdown_in(tmp_path, events)
        assert found.per_step_ns["optimizer"] == 50_000
        assert found.per_step_ns["compute_matmul"] == 560_000

    def test_an_operator_that_began_before_the_step_hides_none_inside(self, tmp_path):
        """Another thread's backward operator reaches into the step, and ends after the one that lies in it."""
        events = [
            *self.FORWARD_AND_BACKWARD,
            operator("autograd::engine::evaluate_function: AddBackward0", 50, 890, 2),
        ]
        found = breakdown_in(tmp_path, events)
        assert found.per_step_ns["optimizer"] == 120_000


def test_a_fused_update_is_what_ran_and_no_function_of_that_name(tmp_path):
    """With stacks a trace names `_multi_tensor_adam` of torch.optim, which is the foreach implementation."""
    function = event("python_function", "torch/optim/adam.py(553): _multi_tensor_adam", 100, 200)
    step_of_adam = [note("Optimizer.step#Adam.step", 90, 300), function, operator("aten::_foreach_add_", 110, 190)]
    assert facts_in(tmp_path, step_of_adam).optimizer == "foreach"
