"""Optimizers that torch does not have, one file each, on torch's multi-tensor operations.

Only what trains imports them: they load torch.
"""
