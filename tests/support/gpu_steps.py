"""Modelled steps of a GPU: milliseconds as profiles of an H200 showed them."""

from dataclasses import replace

from gpu_model import Step

from steptune.tuner.costs.categories import Category as C

LANGUAGE_MODEL = Step(
    name="a small language model whose eager step reads from the device",
    gpu_ms={C.MATMUL: 64, C.ATTENTION: 13, C.NORMALISATION: 1, C.REDUCTION: 3, C.ELEMENTWISE: 8, C.OPTIMIZER: 3},
    host_ms=22,
    optimizer_host_ms=8,
    in_16_bits={C.MATMUL: 0.09, C.ATTENTION: 0.18},
    whole_s=50,
    regional_s=12,
    prepare_s=30,
    num_blocks=12,
    num_block_kinds=1,
    modules={"Conv1D": 48, "LayerNorm": 25},
    host_read="aten::_local_scalar_dense (masks.py, line 776: (mask[:, -1] == 0).all())",
)
CAUSAL = replace(LANGUAGE_MODEL, name="a small language model that reads for its masks alone", mask_refusal="")
CONVOLUTIONS = Step(
    name="a ResNet that waits for launches",
    gpu_ms={C.MATMUL: 3.6, C.NORMALISATION: 2.6, C.REDUCTION: 0.2, C.ELEMENTWISE: 2.3, C.OPTIMIZER: 0.7},
    host_ms=15,
    optimizer_host_ms=3,
    in_16_bits={C.MATMUL: 0.6, C.NORMALISATION: 0.9},
    channels_last={C.MATMUL: 0.7, C.NORMALISATION: 0.8},
    whole_s=45,
    regional_s=43,
    prepare_s=28,
    num_blocks=16,
    num_block_kinds=8,
    modules={"Conv2d": 53, "BatchNorm2d": 53, "Linear": 1},
)
VISION = Step(
    name="a large vision transformer that keeps the device busy",
    gpu_ms={C.MATMUL: 890, C.ATTENTION: 80, C.NORMALISATION: 12, C.REDUCTION: 12, C.ELEMENTWISE: 25, C.OPTIMIZER: 7},
    host_ms=25,
    optimizer_host_ms=10,
    in_16_bits={C.MATMUL: 0.08, C.ATTENTION: 0.15},
    whole_s=53,
    regional_s=8,
    prepare_s=50,
    num_blocks=24,
    num_block_kinds=1,
    modules={"Conv2d": 1, "Linear": 145, "LayerNorm": 49},
)
WINDOWS = Step(
    name="a Swin whose blocks all differ in their rate of stochastic depth",
    gpu_ms={C.MATMUL: 236, C.ATTENTION: 27, C.NORMALISATION: 16, C.REDUCTION: 14, C.ELEMENTWISE: 41, C.OPTIMIZER: 2},
    host_ms=70,
    optimizer_host_ms=8,
    in_16_bits={C.MATMUL: 0.087, C.ATTENTION: 0.43, C.REDUCTION: 0.63},
    whole_s=170,
    regional_s=136,
    prepare_s=41,
    num_blocks=24,
    num_block_kinds=24,
    modules={"Conv2d": 1, "Linear": 148, "LayerNorm": 53},
)
LARGE_LANGUAGE_MODEL = Step(
    name="a large language model on four sequences",
    gpu_ms={C.MATMUL: 900, C.ATTENTION: 60, C.NORMALISATION: 5, C.REDUCTION: 5, C.ELEMENTWISE: 22, C.OPTIMIZER: 11},
    host_ms=45,
    optimizer_host_ms=14,
    in_16_bits={C.MATMUL: 0.08, C.ATTENTION: 0.18},
    whole_s=80,
    regional_s=12,
    prepare_s=40,
    num_blocks=36,
    num_block_kinds=1,
    modules={"Conv1D": 144, "LayerNorm": 73},
)
PROFESSIONAL = replace(
    LARGE_LANGUAGE_MODEL,
    name="a large language model in bf16, compiled",
    today={"precision": {"level": "O1", "dtype": "bfloat16"}, "compile": {"mode": "default"}},
)
STEPS = {
    "language model": LANGUAGE_MODEL,
    "causal model": CAUSAL,
    "convolutions": CONVOLUTIONS,
    "vision": VISION,
    "windows": WINDOWS,
    "large language model": LARGE_LANGUAGE_MODEL,
    "professional": PROFESSIONAL,
}
