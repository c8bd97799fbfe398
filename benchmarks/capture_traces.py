"""Captures the small traces that tests read, with what is known of them: run once for each kind of device.

    python benchmarks/capture_traces.py --out tests/captures

Writes `<name>.json.gz` and one `captures.json` with the step time without the profiler and what each trace must show.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from stamp import stamp
from torch import nn
from torch.utils.checkpoint import checkpoint

from steptune.tuner.trials.capture import record_profile

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def training(device: torch.device, *, width: int, depth: int, recompute: bool = False, compiled: bool = False):
    blocks = nn.ModuleList(Block(width) for _ in range(depth)).to(device)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(blocks.parameters(), fused=on_cuda, capturable=on_cuda)
    batch = torch.randn(512, width, device=device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x.square().mean()

    loss_of = torch.compile(forward) if compiled else forward

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        optimizer.step()

    return step


def with_item(device: torch.device) -> Callable[[], None]:
    """Reads the loss on the host in every step, then prepares for 2 ms."""
    run = training(device, width=512, depth=2)
    value = torch.ones((), device=device)

    def step() -> None:
        run()
        value.item()
        time.sleep(0.002)

    return step


class Slow(torch.utils.data.Dataset):
    """Samples that take a millisecond each."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((256,), float(index % 7))


def with_slow_input(device: torch.device) -> Callable[[], None]:
    """Eight samples a step, loaded where the step runs."""
    model = nn.Sequential(*(Block(256) for _ in range(2))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=8))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(next(batches).to(device)).square().mean().backward()
        optimizer.step()

    return step


def with_copies_beside(device: torch.device) -> Callable[[], None]:
    """32 MB from pinned memory, on a stream of their own, while matrix products run."""
    host = torch.randn(8 << 20, pin_memory=True)
    target = torch.empty_like(host, device=device)
    matrix = torch.randn(4096, 4096, device=device)
    side = torch.cuda.Stream()

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        for _ in range(4):
            torch.mm(matrix, matrix)
        torch.cuda.current_stream().wait_stream(side)

    return step


def replayed(device: torch.device) -> Callable[[], None]:
    """The launch-bound step, recorded once."""
    step = training(device, width=64, depth=12)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def captures(device: torch.device) -> dict[str, tuple[Callable[[], None], dict[str, bool]]]:
    detailed = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    found: dict[str, tuple[Callable[[], None], dict[str, bool]]] = {}
    if device.type == "cuda":
        found = {"copies_beside": (with_copies_beside(device), {}), "cuda_graph": (replayed(device), {})}
    return {
        **found,
        "launch_bound": (training(device, width=64, depth=12), {}),
        "input_bound": (with_slow_input(device), {}),
        "checkpointed": (training(device, width=1024, depth=3, recompute=True), {"record_shapes": True}),
        "detailed": (training(device, width=512, depth=2), detailed),
        "compiled": (training(device, width=1024, depth=2, compiled=True), {}),
        "item_in_the_loop": (with_item(device), {}),
    }


def unprofiled_ms(step: Callable[[], None], synchronise: Callable[[], None]) -> float:
    times = []
    for _ in range(7):
        synchronise()
        start = time.perf_counter()
        for _ in range(20):
            step()
        synchronise()
        times.append((time.perf_counter() - start) * 1e3 / 20)
    return sorted(times)[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    synchronise = torch.cuda.synchronize if cuda else lambda: None
    prefix = torch.cuda.get_device_name().split()[1].lower() if cuda else "cpu"
    index = arguments.out / "captures.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    for name, (step, options) in captures(device).items():
        if arguments.names and name not in arguments.names:
            continue
        torch.manual_seed(0)
        for _ in range(10):
            step()
        path = arguments.out / f"{prefix}_{name}.json"
        record_profile(step, STEPS, device, path, options)
        known[path.stem] = {"unprofiled_step_ms": round(unprofiled_ms(step, synchronise), 4), **stamp("", ())}
        with gzip.GzipFile(f"{path}.gz", "wb", mtime=0) as file:
            # Where it lay on the machine that captured it is nobody's business.
            file.write(re.sub(rb',\s*"traceName": "[^"]*"', b"", path.read_bytes()))
        path.unlink()
        print(
            name, known[path.stem]["unprofiled_step_ms"], (arguments.out / f"{path.name}.gz").stat().st_size, flush=True
        )
    index.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
