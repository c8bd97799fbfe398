"""Ready workloads as people train them today: under autocast to bfloat16, with a fused optimizer, and compiled."""

from steptune.tuner.workloads.zoo import zoo_entry


def mixed_precision(entry, **arguments):
    """An entry of the zoo, trained so."""
    workload = zoo_entry(entry)(**arguments)
    workload.current = {
        **workload.current,
        "precision": {"level": "O1", "dtype": "bfloat16"},
        "optimizer_implementation": {"implementation": "fused"},
    }
    return workload


def professional(entry, **arguments):
    """An entry of the zoo, trained so and compiled."""
    workload = mixed_precision(entry, **arguments)
    workload.current = {**workload.current, "compile": {"mode": "default"}}
    return workload
