"""Pages quote the figures of committed result files, rounded, with the spread where there is more than one run.

A row of `QUOTES` is a page, a sentence of it with `{}` where figures stand, and these figures computed from the files.
Figures of several runs are quoted from the smallest to the largest.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def group(name: str, end: str) -> dict[str, float]:
    """Rates of the trials of a group, named by the end of its id: companions are the incumbent beside a trial."""
    members = [row for row in lines(name) if (row["group"] or "").endswith(end)]
    assert len({row["group"] for row in members}) == 1, f"{end} names no single group of {name}"
    return {("incumbent" if row["purpose"] == "companion" else "trial"): row["units_per_s"] for row in members}


def one(end: str) -> dict[str, float]:
    return group("single_gpu_trials.jsonl", end)


def several(end: str) -> dict[str, float]:
    return group("multi_gpu_trials.jsonl", end)


def ratio(rates: dict[str, float]) -> float:
    return rates["trial"] / rates["incumbent"]


def ratios(*ends: str) -> tuple[float, float]:
    """Smallest and largest of trials that ran beside the incumbent on one GPU."""
    found = [ratio(one(end)) for end in ends]
    return min(found), max(found)


def after(end: str, before: str, of: str = "trial") -> float:
    """The ratio of two trials that ran one after the other."""
    return one(end)["trial"] / one(before)[of]


def by_hand(row: str, network: str, allow: str, code: str) -> dict:
    (found,) = [
        line
        for line in lines("multi_gpu.jsonl")
        if (line["row"], line["network"], line["allow"], line["code"]) == (row, network, allow, code)
    ]
    return found


def rates_by_hand(column: str) -> list[float]:
    """On two emulated hosts, in all rows."""
    return [line["by_hand"][column]["units_per_s"] for line in lines("multi_gpu.jsonl") if line["network"] == "two"]


def more_sockets() -> tuple[float, float]:
    pairs = zip(rates_by_hand("DDP, 4 x 4 sockets"), rates_by_hand("DDP 25 MiB"), strict=True)
    found = [many / few for many, few in pairs]
    return min(found), max(found)


def plain_steps_ms() -> tuple[float, float]:
    """Steps of 2 x 64 images with DDP alone in every start on two emulated hosts."""
    found = [
        128e3 / row["units_per_s"]
        for row in lines("multi_gpu_trials.jsonl")
        if row["network"] == "two" and not row["choices"] and row["units_per_s"]
    ]
    return min(found), max(found)


def peak(row: str, layout: str, cap: float | None = 24e9) -> float:
    (found,) = [
        line
        for line in lines("memory.jsonl")
        if (line["row"], line["layout"], line.get("per_rank"), line["cap_bytes"]) == (row, layout, 1, cap)
    ]
    return max(found["peak_bytes"]) / 1e9


def largest(row: str) -> list[int]:
    layouts = ("DDP", "grad_op", "full shard", "full shard, offload")
    found = {
        line["layout"]: line["largest_per_rank"]
        for line in lines("memory.jsonl")
        if line["row"] == row and "largest_per_rank" in line
    }
    return [found[layout] for layout in layouts]


MODELS = ("ViT", "GPT-2", "ResNet", "LSTM")
LEVELS = {
    "TF32": "TF32",
    "O1 bf16": "O1, bfloat16",
    "O1 fp16": "O1, float16",
    "O2 bf16": "O2, bfloat16",
    "O2 fp16": "O2, float16",
}


def guarded() -> dict:
    return json.loads((RESULTS / "guard_power.json").read_text())


def caught(context: str) -> list[int]:
    """Faults of the held-out half, planted in its trainings; then of all."""
    (row,) = [row for row in guarded()["rows"] if row["context"] == context]
    held_out, halves = row["halves"]["second"], row["halves"].values()
    whole = [sum(half[part] for half in halves) for part in ("caught", "faults")]
    return [held_out["material_caught"], held_out["material"], *whole]


def caught_unseen(context: str) -> list[int]:
    (row,) = [row for row in guarded()["unseen"]["rows"] if row["context"] == context]
    return [row["caught"], row["faults"]]


CONTEXTS = ("FP32", "FP32 to bf16 O1", "FP32 to bf16 O2", "FP32 to fp16 O1", "bf16 O1")


def guarded_correct() -> list[int]:
    """Correct changes that were rejected, how many there were, and with how many seeds."""
    rows = guarded()["rows"]
    rejected = sum(len(row["correct_rejected"]) for row in rows)
    return [rejected, sum(sum(row["correct"].values()) for row in rows), rows[0]["seeds_of_correct"]]


def missing_fall(level: str) -> list[float]:
    """Share of FP32's fall in loss that a level has not made, in percent by model; adding 0 makes -0.0 positive."""
    models = json.loads((RESULTS / "numerics.json").read_text())["models"]
    return [round(100 * models[model]["levels"][level]["missing"], 1) + 0.0 for model in MODELS]


def latest(allow: str) -> dict[str, dict]:
    """The last row of every job in the file."""
    return {line["row"]: line for line in lines("single_gpu.jsonl") if line["allow"] == allow}


def over_hand(line: dict, columns: tuple[str, ...]) -> tuple[float, list[float] | None]:
    """Over the better of what was set by hand."""
    found = [line["by_hand"][name] for name in columns if line["by_hand"].get(name, {}).get("ratio")]
    best = min(found, key=lambda column: column["ratio"])
    return best["ratio"], best["interval"]


JOBS = ("vit_large", "swin_base", "swin_tiny_16", "resnet50", "resnet50_16", "gpt2_large", "gpt2_small")
O1 = ("best by hand, O1", "by hand, O1, compiled blocks")
ANY = (*O1, "best by hand, pure bf16")


def single_gpu(allow: str, columns: tuple[str, ...]) -> list[float]:
    """Ratio, and both ends of its interval where there is one, for every job; then the geometric mean."""
    rows = [over_hand(latest(allow)[job], columns) for job in JOBS]
    figures = [figure for found, interval in rows for figure in (found, *(interval or ()))]
    return [*figures, math.exp(sum(math.log(found) for found, _ in rows) / len(rows))]


GUARD = "decisions/0031-precision-taken-back"
QUOTES: list[tuple[str, str, list[float]]] = [
    # one GPU
    (
        "cuda_graph",
        "| Swin-T, batch 16 | FP32, eager | with the fused update | {:.2f}, {:.2f} |",
        [*ratios("h1w9", "d78y")],
    ),
    (
        "cuda_graph",
        "| ResNet-50, batch 16 | FP32, eager | with the fused update | {:.2f}, {:.2f} |",
        [*ratios("1p3z", "72qa")],
    ),
    ("memory_format", "| ResNet-50, batch 16 | O1, one CUDA graph | {:.2f}, {:.2f} |", [*ratios("9nzb", "eae7")]),
    ("memory_format", "| ResNet-50, batch 256 | O1, eager | {:.2f}, {:.2f} |", [*ratios("73gg", "t8cq")]),
    ("memory_format", "| Swin-B, batch 128 | O2, eager | {:.2f}, {:.2f} |", [*ratios("gk5k", "45cc")]),
    (
        "data_loading",
        "ViT-L/16 at batch 128 ({:,.0f} images/s without) {:.2f}",
        [one("b9r8")["incumbent"], *ratios("b9r8")[:1]],
    ),
    (
        "data_loading",
        "ResNet-50 at batch 16 {:.2f} and {:.2f} ({:,.0f} and {:,.0f} images/s without), Swin-T {:.2f}, "
        "ResNet-50 at batch 256 {:.2f}",
        [
            after("2jr1", "87wd"),
            after("gjqt", "pbzj"),
            one("87wd")["trial"],
            one("pbzj")["trial"],
            after("cej2", "z4kg"),
            after("4kfd", "tj0e"),
        ],
    ),
    (
        "precision",
        "| ViT-L/16, batch 128 | FP32 | O1, bfloat16 | {:.1f} to {:.1f}, 3 starts |",
        [*ratios("m30a", "9fzg", "emg5")],
    ),
    (
        "precision",
        "| ViT-L/16, batch 128 | O1, compiled blocks, fused update | O2, bfloat16 | {:.2f} |",
        [*ratios("v12d")[:1]],
    ),
    (
        "precision",
        "| GPT-2 small, 4 x 1,024 | FP32 | O1, bfloat16 | {:.1f} to {:.1f}, 5 starts |",
        [*ratios("rah7", "axhs", "m172", "hvcw", "k9fa")],
    ),
    ("precision", "| GPT-2 large, 8 x 1,024 | FP32 | O1, float16 | {:.1f} |", [after("xewb", "xwd0")]),
    (
        "precision",
        "| GPT-2 large, 8 x 1,024 | FP32 | O1, bfloat16 | {:.1f}, {:.1f} |",
        sorted((after("zssd", "dwqy"), after("eezb", "xzec"))),
    ),
    (
        "precision",
        "| Swin-T, batch 16 | FP32 as one CUDA graph, fused update | O1, bfloat16 | {:.2f}, {:.2f} |",
        [*ratios("rq2s", "jmwx")],
    ),
    (
        "precision",
        "| ResNet-50, batch 16 | FP32 (convolutions in TF32) as one CUDA graph, fused update | O1, bfloat16 |"
        " {:.2f} to {:.2f}, 3 starts |",
        [*ratios("24x2", "e2nk", "19aj")],
    ),
    *[
        ("precision", f"| {shown} | {{:.1f}} % | {{:.1f}} % | {{:.1f}} % | {{:.1f}} % |", missing_fall(level))
        for level, shown in LEVELS.items()
    ],
    (
        "precision",
        "with 4 x 4 sockets ran at {:.0f} images/s in O1 and at {:,.0f} in O2",
        [several("cn3b")["trial"], several("dt3g")["trial"]],
    ),
    (
        "compile",
        "| ViT-L/16, batch 128 | O1, eager | `regional` (7 to 9 s to compile) | {:.2f} to {:.2f}, 3 starts |",
        [*ratios("1ajt", "52h9", "az0g")],
    ),
    ("compile", "| ViT-L/16, batch 128 | O2, `regional` | whole model (50 s) | {:.2f} |", [*ratios("rtyf")[:1]]),
    (
        "compile",
        "| GPT-2 small, 4 x 1,024 | O1, eager | `regional` (10 to 15 s) | {:.2f} to {:.2f}, 5 starts |",
        [*ratios("14s5", "erpg", "x704", "nq2h", "wb89")],
    ),
    (
        "compile",
        "| GPT-2 small, 4 x 1,024 | O1, `regional` | `reduce-overhead` (60 and 62 s), one after the other | "
        "{:.1f}, {:.1f} |",
        [after("8xg3", "erpg"), after("01hy", "14s5")],
    ),
    (
        "compile",
        "| GPT-2 small, 4 x 1,024 | O1, `regional` as one CUDA graph, padded matmuls | whole model as one "
        "CUDA graph (50 s) | {:.2f} |",
        [*ratios("2467")[:1]],
    ),
    ("compile", "| the same, fused update | | whole model as one CUDA graph (46 s) | {:.2f} |", [*ratios("wcmz")[:1]]),
    (
        "compile",
        "| GPT-2 large, 8 x 1,024 | O1, eager | `regional` (12 and 13 s) | {:.2f}, {:.2f} |",
        [*ratios("kw93", "nd6a")],
    ),
    ("compile", "| Swin-B, batch 128 | O2, eager | `reduce-overhead` (126 s) | {:.2f} |", [*ratios("hp9c")[:1]]),
    ("compile", "| Swin-B, batch 128 | O2, eager | `regional` (136 s) | {:.2f} |", [*ratios("xf9n")[:1]]),
    (
        "compile",
        "| ResNet-50, batch 256 | O1, channels-last | `reduce-overhead` (38 s) | {:.2f} |",
        [*ratios("tj0e")[:1]],
    ),
    (
        "compile",
        "| Swin-T, batch 16 | O1 as one CUDA graph | whole model as one CUDA graph (90 s) | {:.2f} |",
        [*ratios("z4kg")[:1]],
    ),
    (
        "compile",
        "| ResNet-50, batch 16 | O1, channels-last, one CUDA graph | whole model as one CUDA graph (41 and 34"
        " s) | {:.2f}, {:.2f} |",
        [*ratios("87wd", "pbzj")],
    ),
    # several GPUs
    ("ddp_buckets", "at O1, {:.2f} times as fast", [ratio(several("gmfz"))]),
    (
        "ddp_buckets",
        "{:,.0f} and {:,.0f} images/s in two starts, without them {:,.0f}",
        [several("jy6h")["trial"], several("xkeb")["trial"], several("f0tm")["trial"]],
    ),
    (
        "nccl_settings",
        "4 threads of 4 sockets with views of buckets {:.2f} times as fast as DDP alone, of which by hand 4 x"
        " 4 sockets alone are {:.1f} to {:.1f}",
        [ratio(several("cn3b")), *more_sockets()],
    ),
    ("nccl_settings", "8 threads of 4 {:.2f} of 4 of 4 with weights of 16 bits", [ratio(several("5xq2"))]),
    ("nccl_settings", "{:.2f} of them with `bf16`", [several("50c0")["trial"] / several("zyyw")["trial"]]),
    ("gradient_compression", "DDP alone: {:.0f} to {:.0f} ms", [*plain_steps_ms()]),
    (
        "gradient_compression",
        "views of buckets {:.2f} times as fast as DDP, `powersgd` of rank 2 alone {:.2f} times",
        [ratio(several("zyyw")), ratio(several("7h9r"))],
    ),
    (
        "gradient_compression",
        "when confirmed {:.1f} ({:.1f} to {:.1f}) and {:.1f} ({:.1f} to {:.1f})",
        [
            figure
            for code in ("d151fd1", "e63c528")
            for row in [by_hand("vit_large", "two", "lossy", code)]
            for figure in (row["gain"], *row["gain_interval"])
        ],
    ),
    (
        "gradient_compression",
        "it leaves {:.0f} % of the step to communication, and the device waits for launches for {:.0f} %",
        [
            100 * by_hand("vit_large", "two", "lossy", "e63c528")["shares_after"][name]
            for name in ("communication", "launch_latency")
        ],
    ),
    (
        "gradient_compression",
        "`powersgd` of rank 4 and 2 is {:.2f} and {:.2f} as fast",
        [several(end)["trial"] / several("zyyw")["trial"] for end in ("p3xs", "rk9z")],
    ),
    (
        "sharding",
        "took {:.0f} ms with DDP at O1, and {:.0f} ms with FSDP2 by blocks without freeing at O2",
        [
            128e3 / by_hand("vit_large", "one", "", "e63c528")["by_hand"][name]["units_per_s"]
            for name in ("DDP 25 MiB", "FSDP2 per block, grad_op")
        ],
    ),
    (
        "sharding",
        "`grad_op` by blocks {:.2f} times as fast as DDP in its first trial and {:.2f} ({:.2f} to {:.2f}) "
        "with two blocks gathered ahead when confirmed; `full` {:.2f} of `grad_op`",
        [
            ratio(several("6vfp")),
            by_hand("vit_large", "two", "", "e63c528")["gain"],
            *by_hand("vit_large", "two", "", "e63c528")["gain_interval"],
            ratio(several("vqy1")),
        ],
    ),
    (
        "sharding",
        "| DDP | {:.2f} | out of memory ({:.2f} without the limit) |",
        [peak("gpt2_large", "DDP"), peak("gpt2_xl", "DDP", None)],
    ),
    ("sharding", "| `full`, one unit (`root`) | {:.2f} | out of memory |", [peak("gpt2_large", "no wrap")]),
    *[
        (
            "sharding",
            f"| `full`, `size`, `min_num_params` {size} | {{:.2f}} | {{:.2f}}",
            [peak(row, f"min_num_params {size}") for row in ("gpt2_large", "gpt2_xl")],
        )
        for size in ("1,000,000", "2,000")
    ],
    (
        "sharding",
        "(the last three by blocks) | {}, {}, {}, {} | {}, {}, {}, {} |",
        [*largest("gpt2_large"), *largest("gpt2_xl")],
    ),
    (
        "sharding",
        "by at most {:.1f} %",
        [100 * max(abs(line["error"]) for line in lines("memory.jsonl") if line.get("error") is not None)],
    ),
    # the guard
    *[
        (
            GUARD,
            f"| {context} | {{}} of {{}} | {{}} of {{}} | {{}} of {{}} |",
            [*caught(context), *caught_unseen(context)],
        )
        for context in CONTEXTS
    ],
    (GUARD, "Correct changes: {} of {} rejected, with {} seeds", guarded_correct()),
    (
        GUARD,
        "A candidate takes {} steps, {} without masks",
        [guarded()["steps"]["candidate"], guarded()["steps"]["candidate_without_masks"]],
    ),
    (
        GUARD,
        "reference takes {} in FP32 and {} in bfloat16",
        [guarded()["steps"]["reference"]["FP32"], guarded()["steps"]["reference"]["bf16"]],
    ),
    # how far it can be believed
    *[
        (
            "../README",
            f"{name}, beside the best settings by hand | one H200 | {{:.2f}}× ({{:.2f}} to {{:.2f}})",
            figures,
        )
        for name, figures in (
            ("GPT-2 small", single_gpu("", O1)[18:21]),
            ("Swin-B", single_gpu("", O1)[3:6]),
            ("ResNet-50 at batch 256", single_gpu("", O1)[9:12]),
        )
    ],
    (
        "./results",
        "ViT-L {:.2f} ({:.2f} to {:.2f}), Swin-B {:.2f} ({:.2f} to {:.2f}), Swin-T at batch 16 {:.2f} ({:.2f}"
        " to {:.2f}), ResNet-50 {:.2f} "
        "({:.2f} to {:.2f}) at batch 256 and {:.2f} ({:.2f} to {:.2f}) at batch 16, GPT-2 large {:.2f} "
        "({:.2f} to {:.2f}), GPT-2 small {:.2f} "
        "({:.2f} to {:.2f}) times the best of O1 by hand in the same command (`torch.compile` of the model or"
        " of its blocks, fused AdamW, "
        "channels-last, CUDA graphs): {:.2f} in the geometric mean",
        single_gpu("", O1),
    ),
    (
        "./results",
        "{:.1f} to {:.1f} times today's FP32",
        [end(row["gain"] for row in latest("").values()) for end in (min, max)],
    ),
    (
        "./results",
        "pure bfloat16 by hand: {:.2f} ({:.2f} to {:.2f}), {:.2f} ({:.2f} to {:.2f}), {:.2f} ({:.2f} to "
        "{:.2f}), {:.2f} ({:.2f} to {:.2f}), "
        "{:.2f} ({:.2f} to {:.2f}), {:.2f} (one start, no interval), {:.2f} ({:.2f} to {:.2f}), {:.2f} in the"
        " geometric mean",
        single_gpu("lossy", ANY),
    ),
]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("page", "sentence", "figures"), QUOTES, ids=[f"{page}-{index}" for index, (page, _, _) in enumerate(QUOTES)]
)
def test_pages_quote_the_figures_of_result_files(page: str, sentence: str, figures: list[float]):
    """A figure that a run has changed is changed on its page, too."""
    path = ROOT / "docs" / (page if "/" in page else f"strategies/{page}")
    path = path.with_suffix(".md")
    assert words(sentence.format(*figures)) in words(path.read_text())
