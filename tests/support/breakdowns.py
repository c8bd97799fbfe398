"""The breakdowns of a trace that was read, without the rest of its analysis."""

from steptune.tuner.profiling.breakdown import breakdown_of
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.cpu_time import cpu_time
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.trace import Trace
from steptune.tuner.records import Breakdown


def analyse(trace: Trace, unprofiled_step_time_ns: int | None = None) -> tuple[Breakdown, ...]:
    """One breakdown per device in the trace (one for the CPU where there is no device work)."""
    capture = link(trace)
    devices = capture.device_numbers
    if not devices:
        return (breakdown_of(capture, "cpu", cpu_time(capture), unprofiled_step_time_ns),)
    return tuple(
        breakdown_of(capture, f"cuda:{device}", device_time(capture, device)[0], unprofiled_step_time_ns)
        for device in devices
    )
