"""Optimizers that torch lacks, one file each, built on torch's multi-tensor operations.

Only code that trains imports them, because they load torch.
"""
