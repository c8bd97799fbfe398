"""No advice names what a trace shows to be on: every combination of seven facts, captures, public traces."""

import itertools
from pathlib import Path

import pytest
from trace_events import copy, event, launched, note, operator, runtime, step, trace_of
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling.analysis import analyse_rank, analyse_trace
from steptune.tuner.trace_records import RankAnalysis

CAPTURES = sorted((Path(__file__).resolve().parents[1] / "captures").glob("*.json.gz"))
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "totalGlobalMem": 1 << 36}
FUSED = "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
FOREACH = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<float>>"
BF16_KERNEL, FP32_KERNEL = "ampere_bf16_s16816gemm_bf16_128x64", "ampere_sgemm_128x64_tn"
FACTS = ("compile", "graph", "fused", "bf16", "pinned", "workers", "channels_last")
FORBIDDEN = {
    # By fact: strategies, and words of advice.
    "compile": ({"compile"}, "compile the model"),
    "graph": ({"cuda_graph"}, "as a CUDA graph"),
    "fused": ({"optimizer_implementation"}, "fuse the optimizer"),
    "bf16": ({"precision"}, "16-bit"),
    "pinned": (set(), "pin memory"),
    "workers": (set(), "load with worker processes"),
    "channels_last": ({"memory_format"}, "channels_last"),
}


def loop(on: frozenset[str]) -> list:
    """Three steps of 1000 us in which each fact that is off costs enough to be found."""
    found: list = []
    loader = "_MultiProcessingDataLoaderIter" if "workers" in on else "_SingleProcessDataLoaderIter"
    matmul = BF16_KERNEL if "bf16" in on else FP32_KERNEL
    memory = "Pinned" if "pinned" in on else "Pageable"
    for number in range(3):
        at, call = 1000 * number, 10 * number
        found += [
            step(number, at, at + 1000),
            note(f"enumerate(DataLoader)#{loader}.__next__", at, at + 200),
            runtime("cudaMemcpyAsync", at + 201, at + 205, call + 1),
            copy(f"Memcpy HtoD ({memory} -> Device)", at + 206, at + 300, call + 1),
            operator("aten::mm", at + 301, at + 310),
            *launched(matmul, at + 302, at + 310, at + 450, call + 2),
            operator("aten::gelu", at + 451, at + 500),
            *launched("vectorized_elementwise_kernel", at + 480, at + 500, at + 650, call + 3),
            note("Optimizer.step#AdamW.step", at + 700, at + 900),
            operator("aten::_fused_adamw_" if "fused" in on else "aten::_foreach_add_", at + 710, at + 800),
            *launched(FUSED if "fused" in on else FOREACH, at + 750, at + 760, at + 920, call + 4),
        ]
        if "compile" in on:
            found.append(event("cpu_op", "Torch-Compiled Region: 0/0", at + 301, at + 305))
        if "graph" in on:
            found += launched("fill_kernel", at + 941, at + 996, at + 997, call + 5)
            found[-2]["name"] = "cudaGraphLaunch"
        layout = "sm80_xmma_fprop_nhwc" if "channels_last" in on else "nchwToNhwcKernel"
        found += [
            operator("aten::conv2d", at + 930, at + 940),
            *launched(layout, at + 931, at + 933, at + 995, call + 6),
        ]
    return found


def advised(analysis: RankAnalysis) -> tuple[set[str], str]:
    """Strategies and words of all findings."""
    strategies = {strategy for finding in analysis.findings for strategy in finding.strategies}
    return strategies, " | ".join(finding.advice for finding in analysis.findings)


def analysed(folder: Path, on: frozenset[str]) -> RankAnalysis:
    return analyse_trace(trace_of(folder, loop(on), deviceProperties=[A100]), "trace.json")[0]


@pytest.mark.parametrize("mask", range(2 ** len(FACTS)))
def test_nothing_that_is_on_is_advised(tmp_path, mask):
    on = frozenset(fact for place, fact in enumerate(FACTS) if mask >> place & 1)
    strategies, advice = advised(analysed(tmp_path, on))
    for fact in on:
        forbidden, words = FORBIDDEN[fact]
        assert not forbidden & strategies, (fact, strategies)
        assert words not in advice, fact


def test_what_is_off_is_advised(tmp_path):
    """The loop gives a reason for each advice that the other test forbids."""
    strategies, advice = advised(analysed(tmp_path, frozenset()))
    for fact, (wanted, words) in FORBIDDEN.items():
        assert wanted <= strategies, (fact, strategies)
        assert words in advice, (fact, advice)


def contradictions(analysis: RankAnalysis) -> list[str]:
    """Facts of a trace that its findings advise."""
    facts = analysis.breakdowns[0].facts
    on = {
        "compile": facts.compiled,
        "graph": facts.cuda_graphs,
        "fused": facts.optimizer == "fused",
        "bf16": facts.matmul_dtype in ("bfloat16", "float16", "float8"),
        "pinned": bool(facts.pinned_memory),
        "workers": facts.loader == "workers",
        "channels_last": bool(facts.channels_last),
    }
    strategies, advice = advised(analysis)
    wrong = [fact for fact, (forbidden, words) in FORBIDDEN.items() if on[fact] and forbidden & strategies]
    return wrong + [fact for fact, (_, words) in FORBIDDEN.items() if on[fact] and words in advice]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_captures_are_not_advised_what_they_have(path):
    assert contradictions(analyse_rank(path)) == []


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_public_traces_are_not_advised_what_they_have(name):
    assert contradictions(analyse_rank(trace_file(name))) == []


def test_combinations_differ():
    assert (
        len({tuple(map(str, loop(frozenset(on)))) for n in range(3) for on in itertools.combinations(FACTS, n)}) == 29
    )
