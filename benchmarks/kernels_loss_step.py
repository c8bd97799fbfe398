"""A training step of the zoo's detectors with the kernel of their assignment and without.

    python benchmarks/kernels_loss_step.py --seconds 100 --out FOLDER        # needs a CUDA device
    python benchmarks/kernels_loss_step.py --small --out FOLDER              # tries the script on a CPU; no figures

The detector (SimOTA, batch 16, 640 x 640) and the monocular 3-D detector (FCOS3D's targets, batch 4, 896 x 1536) as the
zoo has them, fused AdamW, in FP32 and under autocast to bfloat16; the kernel is applied as `fused_kernels` does it.
The loss with the kernel is compared with that without before anything is timed. Lines are as in `kernels_step.py`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from kernel_timing import DEVICE, ROOT, Clock
from kernels_step import NUM_ROUNDS, NUM_WARMUP, TrainingStep, quantiles, step_times_ms
from stamp import device_stamp, stamp
from torch.utils.data import default_collate

from steptune.kernels.applying import use_kernel
from steptune.tuner.workloads.zoo.detector import Detector
from steptune.tuner.workloads.zoo.monocular_3d import Monocular3D

SMALL: dict[str, dict[str, Any]] = {
    "simota": {"batch": 2, "image_size": 64, "width": 8, "depth": 0, "num_classes": 5, "most_boxes": 3},
    "fcos3d": {"batch": 2, "height": 128, "image_width": 128, "width": 8, "depth": 0, "most_boxes": 3},
}
WORKLOADS = {"simota": Detector, "fcos3d": Monocular3D}
TOLERANCE = 1e-3
"""Share of the loss by which the two ways may differ; it is computed in FP32."""


class LossStep(TrainingStep):
    def __init__(self, workload: Any, model: torch.nn.Module, batch: Any, dtype: torch.dtype) -> None:
        self.workload, self.model, self.batch, self.dtype = workload, model, batch, dtype
        fused = DEVICE.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def backward(self) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.workload.loss(self.model, self.workload.batch_transform(self.batch))
        loss.backward()
        return loss.detach()


def make_steps(kernel: str, dtype: torch.dtype, small: bool) -> dict[str, LossStep]:
    arguments = SMALL[kernel] if small else {}
    torch.manual_seed(0)
    model = WORKLOADS[kernel](**arguments).model().to(DEVICE)
    steps = {}
    for way in ("eager", "eager, kernel"):
        workload, own = WORKLOADS[kernel](**arguments), copy.deepcopy(model)
        if way != "eager":
            use_kernel(own, kernel, workload)
        dataset = workload.dataset()
        samples = [dataset[number] for number in range(workload.global_batch)]
        batch = {name: tensor.to(DEVICE) for name, tensor in default_collate(samples).items()}
        steps[way] = LossStep(workload, own, batch, dtype)
    return steps


def check(steps: dict[str, LossStep]) -> float:
    """Compare the losses of both ways.

    Raises:
        ValueError: They differ.
    """
    plain, fused = (float(step.backward()) for step in steps.values())
    if not abs(plain - fused) <= TOLERANCE * abs(plain):
        raise ValueError(f"another training: the loss is {fused}, without the kernel {plain}")
    return abs(plain - fused) / abs(plain)


def rows(kernel: str, dtype: torch.dtype, small: bool) -> list[dict]:
    steps = make_steps(kernel, dtype, small)
    about = {
        "model": WORKLOADS[kernel].__name__,
        "batch": next(iter(steps.values())).workload.global_batch,
        "dtype": str(dtype).removeprefix("torch."),
        "losses differ by": check(steps),
    }
    if small:
        return [{**about, **stamp("")}]
    times: dict[str, list[float]] = {way: [] for way in steps}
    for step in steps.values():
        for _ in range(NUM_WARMUP):
            step()
    torch.cuda.synchronize()
    for _ in range(NUM_ROUNDS):
        for way, step in steps.items():
            times[way] += step_times_ms(step)
    return [{**about, "label": way, "step_ms": quantiles(own), **device_stamp()} for way, own in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    arguments = parser.parse_args()
    clock = Clock(arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "kernels_step.jsonl").open("a", encoding="utf-8") as file:
        for kernel in arguments.kernels:
            for dtype in (torch.float32, torch.bfloat16):
                if clock.left < 5:
                    print(f"{kernel}, {dtype}: not begun: the time was over", flush=True)
                    continue
                for row in rows(kernel, dtype, arguments.small):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    print(f"{clock.passed:5.0f} s  {row}"[:300], flush=True)


if __name__ == "__main__":
    main()
