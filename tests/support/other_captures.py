"""One small training as several profilers record it, in their documented layouts; times are nanoseconds."""

import csv
import gzip
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_events import MAIN, Event, event, write_trace

GEMM, ADD, ALLREDUCE = "ampere_sgemm_128x64", "vectorized_elementwise_kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
STEP_NS, NUM_STEPS = 1_000_000, 4
PROCESS = 321
GLOBAL_ID = (1 << 48) | (PROCESS << 24)


@dataclass(frozen=True)
class Launched:
    """An operation of the device, and the call that launched it."""

    name: str
    call: tuple[int, int]
    run: tuple[int, int]
    correlation: int
    is_copy: bool = False


def launches() -> Iterator[Launched]:
    """A copy from pageable memory, two kernels and a collective a step, with idle time between them."""
    for number in range(NUM_STEPS):
        begin = 10**9 + number * STEP_NS
        places = ((20, 40, 60), (110, 130, 330), (350, 360, 500), (510, 520, 600))
        for place, (call, low, high) in enumerate(places):
            yield Launched(
                name=("copy", GEMM, ADD, ALLREDUCE)[place],
                call=(begin + call * 1000, begin + (call + 5) * 1000),
                run=(begin + low * 1000, begin + high * 1000),
                correlation=10 * number + place + 1,
                is_copy=place == 0,
            )


def ranges(step: str = "train_step {}") -> Iterator[tuple[str, int, int]]:
    """The steps, their forward passes and the waits for their batches."""
    for number in range(NUM_STEPS):
        begin = 10**9 + number * STEP_NS
        yield step.format(number), begin, begin + STEP_NS
        yield "forward step", begin + 100_000, begin + 400_000
        yield "data_fetch", begin + 620_000, begin + 980_000


def kineto(folder: Path) -> Path:
    """Capture as torch.profiler has it."""
    events: list[Event] = []

    def host(category: str, name: str, start: int, end: int, **args: int) -> None:
        events.append(event(category, name, start / 1000, end / 1000, MAIN, **args))

    for number, (name, start, end) in enumerate(ranges()):
        host("user_annotation", f"ProfilerStep#{number // 3}" if number % 3 == 0 else name, start, end)
    for one in launches():
        at = {"correlation": one.correlation, "device": 0, "stream": 7}
        host("cuda_runtime", "cudaMemcpyAsync" if one.is_copy else "cudaLaunchKernel", *one.call, **at)
        name = "Memcpy HtoD (Pageable -> Device)" if one.is_copy else one.name
        run = (one.run[0] / 1000, one.run[1] / 1000)
        events.append(event("gpu_memcpy" if one.is_copy else "kernel", name, *run, 7, **at))
    return write_trace(folder / "kineto.json", events)


def nsight(folder: Path, step: str = "train_step {}", processes: Sequence[int] = (PROCESS,)) -> Path:
    """An export of Nsight Systems."""
    path = folder / "report.sqlite"
    path.unlink(missing_ok=True)
    names: dict[str, int] = {}

    def number_of(name: str) -> int:
        return names.setdefault(name, len(names) + 1)

    with sqlite3.connect(path) as base:
        base.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
            CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, text TEXT,
                globalTid INT, endGlobalTid INT, textId INT, domainId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL,
                globalTid INT, correlationId INT, nameId INT NOT NULL, returnValue INT NOT NULL, callchainId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
                contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT, globalPid INT,
                demangledName INT NOT NULL, shortName INT NOT NULL, graphNodeId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
                contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT, globalPid INT, bytes INT NOT NULL,
                copyKind INT NOT NULL, srcKind INT, dstKind INT);
            CREATE TABLE TARGET_INFO_GPU (vmId INT NOT NULL, id INT NOT NULL, name TEXT, totalMemory INT, smCount INT,
                computeMajor INT, computeMinor INT);
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT, utcTime TEXT, localTime TEXT);
            CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INT PRIMARY KEY, name TEXT, label TEXT);
            INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'CUDA_MEMCPY_KIND_HTOD', 'Host-to-Device');
            INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA H100', 85000000000, 132, 9, 0);
            INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000, '', '');
            """
        )
        for number, (name, start, end) in enumerate(ranges(step)):
            # The API has both: a text of its own, and one that was registered.
            text = (name, None) if number % 2 else (None, number_of(name))
            row = (start, end, 59, number, text[0], GLOBAL_ID | 321, None, text[1], 0)
            base.execute(f"INSERT INTO NVTX_EVENTS VALUES ({', '.join('?' * 9)})", row)
        base.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 34, 0, 'a mark', ?, NULL, NULL, 0)", (GLOBAL_ID | 321,))
        for one in launches():
            call = number_of("cudaMemcpyAsync_v3020" if one.is_copy else "cudaLaunchKernel_v7000")
            row = (*one.call, 0, GLOBAL_ID | 321, one.correlation, call, 0, None)
            base.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({', '.join('?' * 8)})", row)
            for process in processes:
                place = (*one.run, 0, 1, 7, one.correlation, (1 << 48) | (process << 24))
                if one.is_copy:
                    base.execute(
                        f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({', '.join('?' * 11)})", (*place, 64, 1, 0, 2)
                    )
                else:
                    name = number_of(one.name)
                    base.execute(
                        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 10)})",
                        (*place, name, name, None),
                    )
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in names.items()])
    return path


def jax(folder: Path, *, marks: str = "host") -> Path:
    """A profile of JAX on a GPU.

    Args:
        marks: "host" (StepTraceAnnotation), "device" (the line "Steps"), or "" for none.
    """

    def event(process: int, thread: int, name: str, start: int, end: int, **args: str) -> dict:
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        return {"ph": "X", "pid": process, "tid": thread, "name": name, **times, "args": args}

    def named(what: str, process: int, name: str, **more: int) -> dict:
        return {"ph": "M", "pid": process, "name": what, "args": {"name": name}, **more}

    rows = [
        named("process_name", 1, "/device:GPU:0 NVIDIA H100"),
        named("thread_name", 1, "Stream #13(Compute,MemcpyH2D)", tid=13),
        named("thread_name", 1, "XLA Modules", tid=90),
        named("thread_name", 1, "Steps", tid=91),
        named("process_name", 701, "/host:CPU"),
        named("thread_name", 701, "python3", tid=5),
    ]
    for number, (name, start, end) in enumerate(ranges()):
        if number % 3:
            rows.append(event(701, 5, name, start, end))
        elif marks == "host":
            rows.append(event(701, 5, "train", start, end, step_num=str(number // 3)))
        elif marks == "device":
            rows.append(event(1, 91, str(number // 3), start, end))
        rows.append(event(1, 90, "jit_step", start, end))
    for one in launches():
        link = {"correlation_id": str(one.correlation)}
        rows.append(event(701, 5, "cuMemcpyHtoDAsync_v2" if one.is_copy else "cuLaunchKernel", *one.call, **link))
        rows.append(event(1, 13, "MemcpyH2D" if one.is_copy else one.name, *one.run, hlo_module="jit_step", **link))
    run = folder / "plugins" / "profile" / "2026_01_01"
    run.mkdir(parents=True, exist_ok=True)
    path = run / "host.trace.json.gz"
    path.write_bytes(
        gzip.compress(json.dumps({"displayTimeUnit": "ns", "metadata": {}, "traceEvents": [*rows, {}]}).encode())
    )
    return path


def rocprof_json(folder: Path) -> Path:
    """A result of rocprofv3 as JSON."""
    names = list(dict.fromkeys(one.name for one in launches() if not one.is_copy))

    def record(kind: int, operation: int, span: tuple[int, int], correlation: int, **more: object) -> dict:
        return {
            "kind": kind,
            "operation": operation,
            "thread_id": 321,
            "correlation_id": {"internal": correlation, "external": 0},
            "start_timestamp": span[0],
            "end_timestamp": span[1],
            **more,
        }

    agent = {"handle": 77}
    marks = [(10_000 + number, name, (start, end)) for number, (name, start, end) in enumerate(ranges())]
    tool = {
        "metadata": {"pid": PROCESS},
        "agents": [
            {"id": {"handle": 1}, "type": 1, "name": "EPYC"},
            {"id": agent, "type": 2, "name": "gfx942", "product_name": "AMD Instinct MI300X"},
        ],
        "kernel_symbols": [{"kernel_id": n + 1, "formatted_kernel_name": name} for n, name in enumerate(names)],
        "strings": {
            "buffer_records": [
                {"kind": "NONE", "operations": []},
                {"kind": "HIP_RUNTIME_API", "operations": ["hipMemcpyAsync", "hipLaunchKernel"]},
                {"kind": "MEMORY_COPY", "operations": ["NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
                {"kind": "KERNEL_DISPATCH", "operations": ["NONE", "KERNEL_DISPATCH_COMPLETE"]},
                {"kind": "MARKER_CORE_RANGE_API", "operations": ["roctxThreadRangeA"]},
            ],
            "marker_api": [{"key": key, "value": name} for key, name, _ in marks],
        },
        "buffer_records": {
            "marker_api": [record(4, 0, span, key) for key, _, span in marks],
            "hip_api": [record(1, int(not one.is_copy), one.call, one.correlation) for one in launches()],
            "kernel_dispatch": [
                record(
                    *(3, 1, one.run, one.correlation),
                    dispatch_info={
                        "agent_id": agent,
                        "queue_id": {"handle": 5},
                        "kernel_id": names.index(one.name) + 1,
                    },
                )
                for one in launches()
                if not one.is_copy
            ],
            "memory_copies": [
                record(2, 1, one.run, one.correlation, src_agent_id={"handle": 1}, dst_agent_id=agent, bytes=64)
                for one in launches()
                if one.is_copy
            ],
        },
    }
    path = folder / "321_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [tool]}))
    return path


def rocprof_csv(folder: Path) -> Path:
    """Capture of rocprof as tables; the one of the kernels stands for all."""
    call = ("Domain", "Function", "Process_Id", "Thread_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp")
    kernel = ("Kind", "Agent_Id", "Queue_Id", "Kernel_Id", "Kernel_Name", "Correlation_Id", *call[-2:])
    copy = ("Kind", "Direction", "Source_Agent_Id", "Destination_Agent_Id", "Correlation_Id", *call[-2:])
    marks = [("MARKER_CORE_API", name, PROCESS, 321, 9000, start, end) for name, start, end in ranges()]
    tables: dict[str, list[tuple]] = {
        "marker_api_trace": [call, *marks],
        "hip_api_trace": [call],
        "kernel_trace": [kernel],
        "memory_copy_trace": [copy],
    }
    for one in launches():
        name = "hipMemcpyAsync" if one.is_copy else "hipLaunchKernel"
        tables["hip_api_trace"].append(("HIP_RUNTIME_API", name, PROCESS, 321, one.correlation, *one.call))
        if one.is_copy:
            row = ("MEMORY_COPY", "MEMORY_COPY_HOST_TO_DEVICE", "Agent 0", "Agent 4", one.correlation, *one.run)
            tables["memory_copy_trace"].append(row)
        else:
            row = ("KERNEL_DISPATCH", "Agent 4", 1, 3, one.name, one.correlation, *one.run)
            tables["kernel_trace"].append(row)
    for name, rows in tables.items():
        with (folder / f"321_{name}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows(rows)
    return folder / "321_kernel_trace.csv"
