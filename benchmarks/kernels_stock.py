"""Stock formulations where no kernel of ours is: is there something left to gain?

    python benchmarks/kernels_stock.py --seconds 150 --out FOLDER        # needs a CUDA device
    python benchmarks/kernels_stock.py --small --out FOLDER              # tries the script on a CPU; no figures

Three questions. `norm`: dropout, bias, residual and LayerNorm compiled, and LayerNorm's backward, over a copy of their
bytes. `head`: a linear layer over a large vocabulary with cross entropy: plain, compiled, in chunks that are computed
again, PyTorch's `linear_cross_entropy` where it has that, Liger's and cut cross entropy where they are installed, with
the peak of memory. `experts`: products of experts, one by one, and grouped. Times are as in `kernels.py`.

Rules, written before the rows. A kernel for a row of `norm` is written where the compiled `both, graph` takes more than
1.5 times its floor: one at 1.15 times the floor is 1.3 times as fast then, and less does not pay for a kernel. Liger's
or cut cross entropy becomes an optional dependency where, at two of the three heads, its step takes no longer than
`chunks` and at most 1.5 times `compiled`, and its peak is at most half of that of `compiled`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from kernel_timing import DEVICE, ROOT, Clock, Times, captured, copy_rate, error, timed
from stamp import device_stamp, stamp
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

torch._functorch.config.donated_buffer = False
CHUNKS = 8
HEADS = (("gpt2", 8192, 768, 50257), ("llama", 8192, 2048, 128256), ("t5", 8192, 768, 32128))
"""Name, tokens, width, vocabulary."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if DEVICE.type == "cpu":
        return function
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def both_ways(function: Callable[..., Any], given: list[Tensor]) -> Times:
    """Time forward, and backward by itself, of a function of tensors to one or more."""
    with torch.no_grad():
        forward = timed(lambda: function(*given))
    out = function(*given)
    out = out if isinstance(out, tuple) else (out,)
    weights = [torch.randn_like(one) for one in out]
    leaves = [tensor for tensor in given if tensor.requires_grad]
    with torch.autograd.set_multithreading_enabled(False):
        backward = timed(lambda: torch.autograd.grad(out, leaves, weights, retain_graph=True))

        # Leaves of their own: those of `out` belong to the stream of its backward pass, which a capture must not touch.
        again = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]

        def both() -> tuple[Tensor, ...]:
            result = function(*again)
            results = result if isinstance(result, tuple) else (result,)
            return torch.autograd.grad(results, [own for own in again if own.requires_grad], weights)

        replayed = timed(captured(both))
    return {"forward": forward, "backward": backward, "both, graph": replayed}


def norm_rows(rate: float, clock: Clock, small: bool) -> Iterator[dict]:
    """Floors: both inputs read, the residual (with dropout) and the normalised written; backward as the reference."""
    for tokens, width in ((64, 96),) if small else ((401408, 96), (100352, 192), (50176, 768), (25216, 1536)):
        x, residual = (torch.randn(tokens, width, device=DEVICE).bfloat16().requires_grad_() for _ in range(2))
        bias, weight, shift = (torch.randn(width, device=DEVICE).requires_grad_() for _ in range(3))

        def whole(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
            summed = residual + functional.dropout(x + bias.to(x.dtype), 0.1)
            y = functional.layer_norm(summed.float(), summed.shape[-1:], weight, shift).to(x.dtype)
            return summed, y

        def norm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
            return functional.layer_norm(x.float(), x.shape[-1:], weight, shift).to(x.dtype)

        def eager_norm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
            return functional.layer_norm(x, x.shape[-1:], weight.to(x.dtype), shift.to(x.dtype))

        one = x.nbytes / rate * 1e6
        yield {
            "kernel": "norm",
            "case": f"dropout, bias, residual, LayerNorm: {tokens} x {width}, bfloat16",
            "floor_us": {"forward": 4 * one, "backward": 4.5 * one, "both, graph": 8.5 * one},
            "times": {
                "compiled": clock.attempt(
                    lambda f=whole, g=(x, residual, bias, weight, shift): both_ways(compiled(f), list(g))
                )
            },
        }
        yield {
            "kernel": "norm",
            "case": f"LayerNorm: {tokens} x {width}, bfloat16",
            "floor_us": {"forward": 2 * one, "backward": 3 * one, "both, graph": 5 * one},
            "times": {
                label: clock.attempt(lambda f=f, g=(x, weight, shift): both_ways(f, list(g)))
                for label, f in {"compiled": compiled(norm), "eager": eager_norm}.items()
            },
        }


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((x @ weight.T).float(), labels)


def in_chunks(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    parts = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
    return torch.stack([checkpoint(plain, a, weight, b, use_reentrant=False) for a, b in parts]).mean()


def head_ways() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    ways = {"eager": plain, "compiled": compiled(plain), "chunks": in_chunks}
    own = getattr(functional, "linear_cross_entropy", None)
    if own is not None:
        ways["PyTorch's"] = own
    if find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        ways["Liger's"] = lambda x, w, y: liger_fused_linear_cross_entropy(x, w, y)
    if find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        ways["cut"] = linear_cross_entropy
    return ways


def head_times(function: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Times:
    """Time a step of the head.

    Raises:
        ValueError: The loss is another.
    """
    x, weight, _ = given

    def step() -> Tensor:
        loss = function(*given)
        torch.autograd.grad(loss, (x, weight))
        return loss.detach()

    found = step()
    if not error(found, wanted) < 0.01:
        raise ValueError(f"the loss is {float(found)}, not {float(wanted)}")
    times = {"step": timed(step)}
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        times["step"]["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return times


def head_rows(rate: float, clock: Clock, small: bool) -> Iterator[dict]:
    for name, tokens, width, vocabulary in (("tiny", 64, 16, 300),) if small else HEADS:
        dtype = torch.float32 if small else torch.bfloat16
        x = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
        weight = (0.02 * torch.randn(vocabulary, width, device=DEVICE)).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
        with torch.no_grad():
            wanted = plain(x, weight, labels)
        yield {
            "kernel": "linear_cross_entropy",
            "case": f"{name}: {tokens} tokens, {width} wide, {vocabulary} words, {str(dtype).removeprefix('torch.')}",
            "floor_us": {"step": 3 * 2 * tokens * width * vocabulary / 800e12 * 1e6},
            "times": {
                label: clock.attempt(lambda f=way, g=(x, weight, labels), w=wanted: head_times(f, g, w))
                for label, way in head_ways().items()
            },
        }


def expert_rows(rate: float, clock: Clock, small: bool) -> Iterator[dict]:
    """Products of rows sorted by expert with the experts' weights, uneven."""
    experts, width, hidden, tokens = (4, 16, 32, 64) if small else (8, 1024, 4096, 16384)
    dtype = torch.bfloat16
    x = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(experts, width, hidden, device=DEVICE)).to(dtype).requires_grad_()
    counts = [tokens // experts + (8 if n % 2 else -8) for n in range(experts)]
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)

    def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([part @ own for part, own in zip(x.split(counts), weight, strict=True)])

    ways = {"one by one": one_by_one}
    grouped = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        ways["grouped"] = lambda x, w: grouped(x, w, offs=ends)
    yield {
        "kernel": "experts",
        "case": f"{experts} experts, {tokens} tokens, {width} to {hidden}, bfloat16",
        "floor_us": {
            "forward": 2 * tokens * width * hidden / 800e12 * 1e6,
            "backward": 4 * tokens * width * hidden / 800e12 * 1e6,
        },
        "times": {label: clock.attempt(lambda f=way: both_ways(f, [x, weight])) for label, way in ways.items()},
    }


QUESTIONS = {"norm": norm_rows, "head": head_rows, "experts": expert_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    arguments = parser.parse_args()
    clock, rate = Clock(arguments.seconds), copy_rate()
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = stamp("") if arguments.small else device_stamp()
    with (arguments.out / "kernels_stock.jsonl").open("a", encoding="utf-8") as file:
        for name in arguments.only:
            for row in QUESTIONS[name](rate, clock, arguments.small):
                file.write(json.dumps({**row, "copy_bytes_per_s": rate, **about}) + "\n")
                file.flush()
                print(f"{clock.passed:5.0f} s  {row['case']}", flush=True)
                for label, found in row["times"].items():
                    print(f"          {label}: {found}"[:240], flush=True)


if __name__ == "__main__":
    main()
