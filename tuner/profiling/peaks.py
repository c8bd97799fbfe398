"""Peak compute rates and memory bandwidths of devices by name, as manufacturers state them: without sparsity, at boost
clocks.

A device that is not in the table has no peak, nor has a part of a device (MIG): nothing is guessed.

The peaks were compared with `torch._inductor.analysis.device_info` where PyTorch states one. The others come from
published tables of the makers' data sheets, with figures for sparse matrices halved. Where a data sheet states only
16-bit figures, TF32 is taken as half and FP8 as twice of them, as on the same chip elsewhere. One device of ROCm is
half of an MI250X; a name that two products share ("MI250X / MI250") matches neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9
FLOAT32, TF32, FLOAT16, BFLOAT16, FLOAT8 = "float32", "tf32", "float16", "bfloat16", "float8"


@dataclass(frozen=True)
class Peak:
    """Peak compute rates and memory bandwidth of a device.

    Attributes:
        flops_per_s: FLOP per second, by arithmetic of matmuls ("float32", "tf32", "float16", "bfloat16", "float8").
        bytes_per_s: Memory bandwidth, in bytes per second.
    """

    flops_per_s: dict[str, float]
    bytes_per_s: float


def _peak(gb_per_s: float, **tera: float) -> Peak:
    rates = {name: value * TERA for name, value in tera.items()}
    if "half" in rates:
        rates[FLOAT16] = rates[BFLOAT16] = rates.pop("half")
    return Peak(rates, gb_per_s * GIGA)


_HOPPER_SXM = {"float32": 66.9, "tf32": 494.7, "half": 989.4, "float8": 1978.9}
_A100 = {"float32": 19.5, "tf32": 156.0, "half": 312.0}
_MI300X = {"float32": 163.4, "tf32": 653.7, "half": 1307.4, "float8": 2614.9}

PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"GB200", _peak(8000, float32=80.0, tf32=1250.0, half=2500.0, float8=5000.0)),
    (r"B200", _peak(7700, float32=75.0, tf32=1100.0, half=2250.0, float8=4500.0)),
    (r"GH200 144G", _peak(4900, **_HOPPER_SXM)),
    (r"GH200 (120|480)GB", _peak(4000, **_HOPPER_SXM)),
    (r"H200", _peak(4800, **_HOPPER_SXM)),
    (r"H100 80GB HBM3", _peak(3350, **_HOPPER_SXM)),
    (r"H100 PCIe", _peak(2000, float32=51.2, tf32=378.0, half=756.0, float8=1513.0)),
    (r"H100 NVL", _peak(3930, tf32=417.5, half=835.5, float8=1670.5)),
    (r"A100-SXM4-40GB|A100-PCIE-40GB", _peak(1555, **_A100)),
    (r"A100-SXM4-80GB", _peak(2039, **_A100)),
    (r"A40", _peak(696, float32=37.4, tf32=74.8, half=149.7)),
    (r"A10", _peak(600, float32=31.2, tf32=62.5, half=125.0)),
    (r"L4", _peak(300, float32=30.3, tf32=60.0, half=121.0, float8=242.5)),
    (r"L40S", _peak(864, float32=91.6, tf32=183.0, half=362.05, float8=733.0)),
    (r"L40", _peak(864, float32=90.5, tf32=90.5, half=181.05, float8=362.0)),
    (r"V100-SXM2-(16|32)GB|V100-SXM3-32GB|V100-DGXS-(16|32)GB", _peak(900, float32=15.7, float16=125.0)),
    (r"V100-PCIE-(16|32)GB", _peak(900, float32=14.0, float16=112.0)),
    (r"T4", _peak(320, float32=8.1, float16=65.0)),
    (r"GeForce RTX 3090", _peak(936.2, float32=35.6, tf32=35.6, half=71.0)),
    (r"GeForce RTX 4090", _peak(1008, float32=82.6, tf32=82.6, half=165.2, float8=330.3)),
    (r"GeForce RTX 5090", _peak(1792, float32=104.8, tf32=104.8, half=209.5, float8=419.0)),
    (r"MI210", _peak(1600, float32=45.3, half=181.0)),
    (r"MI250X", _peak(1600, float32=47.9, half=191.5)),
    (r"MI300A", _peak(5300, float32=122.6, tf32=490.3, half=980.6, float8=1961.2)),
    (r"MI300X", _peak(5300, **_MI300X)),
    (r"MI325X", _peak(6000, **_MI300X)),
    (r"MI350X", _peak(8000, float32=144.2, half=2306.9, float8=4613.7)),
    (r"MI355X", _peak(8000, float32=157.3, half=2516.6, float8=5033.2)),
)
_MAKER = r"((NVIDIA|Tesla|AMD|Instinct|Quadro) )*"
_FORM = r"( OAM)?"


def peak_of(device_name: str) -> Peak | None:
    """Return the peak rates of the device whose driver reports this name; None for an unknown name."""
    name = device_name.strip()
    return next((peak for pattern, peak in PEAKS if re.fullmatch(_MAKER + f"({pattern})" + _FORM, name, re.I)), None)
