"""Fused kernels, each in a folder of its own beside its slow reference.

`KERNELS` lists ours and those that other packages register by the entry point `steptune.kernels`.
"""

from steptune.kernels.registry import KERNELS, Case, Kernel, kernel_named

__all__ = ["KERNELS", "Case", "Kernel", "kernel_named"]
