"""Prediction of step times from one measured configuration: on other numbers of hosts, with other communication
methods.

    breakdown -> `step`: what a rank does without any exchange
    model and precision -> `volumes`: what there is to exchange, and in which pieces
    cluster -> `cluster`: what exchanging a piece costs (`steptune.tuner.network.collective_costs`)
    choices -> `data_parallel`, `sharded`: tasks of compute and of communication -> `timeline`: when each of them ends

`forecast` does this for the ways to communicate of `plans` over numbers of hosts; `basis` begins it with a study, and
compares it with everything that the study measured.
"""
