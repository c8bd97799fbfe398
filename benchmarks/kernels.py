"""Fused kernels beside the strongest formulations in plain PyTorch.

    python benchmarks/kernels.py --out FOLDER --seconds 285          # all rows; needs a CUDA device and timm
    python benchmarks/kernels.py --out FOLDER --only lamb simota
    python benchmarks/kernels.py --out FOLDER --only window_attention --no-compiled  # leaves compilers out
    python benchmarks/kernels.py --out FOLDER --small                # tries the script on a CPU; no figures

The kernels' tests run first: no time is taken of what is wrong, and each formulation's results are compared with the
reference before it is timed. Every time is the median and the 20th and 80th percentile over the repeats of
`triton.testing.do_bench`, which clears the L2 cache in between. `floor` is the time in which the device copies the
bytes that must be moved, at the rate that a copy of 1 GiB reached in the same run. Rows are written as they come;
nothing new begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from stamp import device_stamp, stamp

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import kernel_assignment
import kernel_gradient
import kernel_optimizers
import kernel_targets
import kernel_windows
from kernel_timing import ROOT, Clock, copy_rate

TESTS = {  # words in the names of tests, and files beside the contract's
    "deep_gradient": ("deep_gradient or int8_blocks", "tests/unit/test_deep_gradient_kernel.py"),
    "fcos3d": ("fcos3d or compaction", "tests/unit/test_fcos3d.py"),
    "lamb": (
        "lamb or lars or multi_tensor or fused_optimizers",
        "tests/unit/test_multi_tensor_kernels.py",
        "tests/unit/test_fused_optimizers.py",
    ),
    "simota": ("simota", "tests/unit/test_simota_kernel.py"),
    "window_attention": ("window_attention", "tests/unit/test_window_attention.py"),
}
NAMES = ("deep_gradient", "fcos3d", "lamb", "simota", "window_attention")


COMPILED = {
    "deep_gradient": (),
    "fcos3d": (),
    "lamb": ("lamb", "lars"),
    "simota": ("simota",),
    "window_attention": ("compiled", "sdpa", "flex", "flex strided", "flex decoding"),
}
"""Formulations that a compiler runs long for, by kernel: processes beside the tests fill its cache."""
COMPILE_S = 120
FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}


def fill_cache(part: str) -> None:
    if part in COMPILED["lamb"]:
        kernel_optimizers.fill_cache(part)
    elif part in COMPILED["simota"]:
        kernel_assignment.fill_cache()
    else:
        kernel_windows.fill_cache(part)


def prepare(names: list[str], folder: Path, clock: Clock, compiled: bool) -> list[str]:
    """Run the tests of kernels, and compile their opponents beside them; give the kernels whose tests passed."""
    parts = [part for name in names for part in COMPILED[name]] if compiled else []
    command = [sys.executable, __file__, "--only-compile"]
    processes = [subprocess.Popen([*command, part], env={**os.environ, **FEW_THREADS}) for part in parts]
    right = tested(names, folder)
    print(f"{clock.passed:5.0f} s  tests passed of: {', '.join(right) or 'none'}", flush=True)
    for part, process in zip(parts, processes, strict=True):
        try:
            process.wait(max(1, COMPILE_S - clock.passed))
        except subprocess.TimeoutExpired:
            print(f"{part}: not compiled in {COMPILE_S} s", flush=True)
            process.kill()
            process.wait()
    print(f"{clock.passed:5.0f} s  compiled", flush=True)
    return right


def tested(names: list[str], folder: Path) -> list[str]:
    """Run the tests of each kernel, side by side, and write what they print; give those that passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "5", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    runs = [
        subprocess.Popen(
            [*command, "-k", TESTS[name][0], "tests/contracts/test_kernels.py", *TESTS[name][1:]],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    ]
    texts = [run.communicate()[0] for run in runs]
    (folder / "kernel_tests.txt").write_text("\n".join(texts), encoding="utf-8")
    for name, text, run in zip(names, texts, runs, strict=True):
        if run.returncode:
            print(f"{name}: a test failed, and no time is taken of what is wrong\n{text[-3000:]}", flush=True)
    return [name for name, run in zip(names, runs, strict=True) if run.returncode == 0]


def rows(names: list[str], clock: Clock, small: bool, compiled: bool) -> Iterator[dict]:
    rate = copy_rate()
    print(f"{clock.passed:5.0f} s  copy {rate / 1e12:.2f} TB/s", flush=True)
    about = stamp(" ".join(["python", *sys.argv])) if small else device_stamp()
    parts = []
    if "deep_gradient" in names:
        parts.append(kernel_gradient.rows(rate, clock, small=small))
        parts.append(kernel_gradient.int8_rows(rate, clock, small=small))
    if "fcos3d" in names:
        parts.append(kernel_targets.rows(rate, clock, small=small))
    if "lamb" in names:
        parts.append(kernel_optimizers.rows(rate, clock, small=small))
    if "simota" in names:
        parts.append(kernel_assignment.rows(rate, clock, small=small))
    if "window_attention" in names:
        parts.append(kernel_windows.rows(rate, clock, small=small, compiled=compiled))
    if "lamb" in names and compiled and not small:
        parts.append(kernel_optimizers.compiled_rows(rate, clock))
    if "window_attention" in names and compiled and not small:
        parts.append(kernel_windows.rows(rate, clock, plans=kernel_windows.OTHER_FLEX))
    for part in parts:
        for row in part:
            yield {**row, "copy_bytes_per_s": rate, **about}


def tell(row: dict, clock: Clock) -> None:
    print(f"{clock.passed:5.0f} s  {row['kernel']}: {row['case']}", flush=True)
    for label, times in row["times"].items():
        text = times.get("failed") or ", ".join(
            f"{part} {found['median_us']:.1f} us = {found['median_us'] / row['floor_us'][part]:.2f} x floor"
            for part, found in times.items()
        )
        print(f"          {label}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seconds", type=float, default=285)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only-compile", help="a formulation, of a process that fills the compiler's cache")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-compiled", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of kernels.jsonl")
    arguments = parser.parse_args()
    if arguments.only_compile:
        fill_cache(arguments.only_compile)
        return
    clock = Clock(arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.only
    if not (arguments.no_tests or arguments.small):
        names = prepare(names, arguments.out, clock, not arguments.no_compiled)
    with (arguments.out / "kernels.jsonl").open("a", encoding="utf-8") as file:
        for row in rows(names, clock, arguments.small, not arguments.no_compiled):
            file.write(json.dumps(row) + "\n")
            file.flush()
            tell(row, clock)


if __name__ == "__main__":
    main()
