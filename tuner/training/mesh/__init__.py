"""Sharding of one model across several ranks by tensor, pipeline and expert parallelism, combined with data
parallelism.

Ranks are a grid of pipeline x data x tensor (or of data x experts), in this order, so that the ranks of one tensor
group are neighbours, on one host. Those that hold one model together are a *replica*. Every rank holds plain tensors,
parts or wholes, under the user's own names (`parts`): so optimizers, autocast and DDP see what they always see.
"""
