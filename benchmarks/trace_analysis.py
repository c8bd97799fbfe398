"""How fast is a trace analysed, and in how much memory, beside HTA (Holistic Trace Analysis)?

    python benchmarks/trace_analysis.py --large

The same files and the same questions: load, launches joined with kernels, busy time, idle time by cause,
overlap of communication and compute. Files are a real trace, repeated (`repeated_trace.py`); every run
is a process of its own, Steptune and HTA in turns. Imports do not count as time, but as memory. HTA
joins launches and kernels while loading; its statistics per launch are not asked for, as Steptune's
breakdown does not answer that. HTA answers "temporal", "idle" and "overlap" one after the other;
Steptune's breakdown is all three, and per step.

HTA's time to load grows with the number of events times the number of marked steps; so each size from one
million on is measured also (the largest: only) with the steps of the first repetition marked alone, which
is HTA's best case.

Beside them `steptune analyze` runs on the same files: all that users see, with replay and tables, as a whole process,
Python's start and imports included. It stands beside HTA both ways: without HTA's start and imports (`command_...`),
which is the harder comparison, and with them (`whole_...`), which is what users wait for. The processor seconds of each
process (user and system) depend less on what else the machine does than its time does. An installation compiles the
sources of both to bytecode; here an uncounted run does it for those of this checkout.

HTA runs in an environment that this script makes with pip, in the cache folder, beside the files; on a host without
network `--hta-python` names an interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from stamp import RESULTS, ROOT, stamp

from steptune.tuner.hardware import cpu_name

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steptune" / "trace_analysis"
TRACES = Path(os.environ.get("STEPTUNE_TRACES") or ROOT.parent / "shared" / "traces")
HTA = "traceinsight==0.6.1"
LARGE = 10_000_000
LEAST_ONCE = 1_000_000
"""Events from which a size is measured with the steps of the first repetition marked alone, too."""
MIB = 2**20
COMMAND = "steptune_analyze"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=TRACES / "h200_swin_t_launch_bound.json.gz")
    parser.add_argument("--events", type=int, nargs="*", default=[200_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="10 million events too, HTA once: half an hour, 12 GiB")
    parser.add_argument("--cache", type=Path, default=CACHE, help="for the traces and HTA's environment")
    parser.add_argument("--hta-python", type=Path, help="an interpreter that has HTA")
    parser.add_argument("--out", type=Path, default=RESULTS / "trace_analysis.json")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    commands = {
        "steptune": [sys.executable, str(HERE / "steptune_questions.py")],
        COMMAND: [sys.executable, "-m", "steptune", "analyze"],
        "hta": [str(arguments.hta_python or hta_python(arguments.cache)), str(HERE / "hta_questions.py")],
    }
    both = dict.fromkeys(commands, arguments.repeats)
    sizes = [
        (size, both, once) for size in arguments.events for once in (False, True) if size >= LEAST_ONCE or not once
    ]
    if arguments.large:
        sizes.append((LARGE, {**both, "hta": 1}, True))
    rows: list[dict] = []
    for size, repeats, once in sizes:
        rows.append(compare(commands, arguments, size, repeats, mark_once=once))
        write(arguments.out, arguments.source.name, rows)


def write(path: Path, source: str, rows: list[dict]) -> None:
    """The report of what is measured so far: a long run that is ended keeps its sizes."""
    report = {
        "question": "seconds and peak memory of analysing one trace, beside HTA",
        **stamp(" ".join(["python", "benchmarks/trace_analysis.py", *sys.argv[1:]])),
        "hta": rows[0]["hta_versions"],
        "hardware": machine(),
        "source": source,
        "sizes": [{key: value for key, value in row.items() if key != "hta_versions"} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def compare(
    commands: dict[str, list[str]],
    arguments: argparse.Namespace,
    size: int,
    repeats: dict[str, int],
    *,
    mark_once: bool = False,
) -> dict:
    """Both on one file, in turns."""
    path, num_events = repeated(arguments.source, arguments.cache, size, mark_once=mark_once)
    runs: dict[str, list[dict]] = {name: [] for name in commands}
    for name in commands.keys() - {"hta"}:
        whole(commands[name], path)
    for turn in range(max(repeats.values())):
        for name, command in commands.items():
            if turn < repeats[name]:
                runs[name].append(whole(command, path)[1] if name == COMMAND else ask(command, path))
                last = runs[name][-1]
                print(
                    f"{num_events:>9} events, {name:16} {total_s(last):8.2f} s {last['peak_bytes'] // MIB:6} MiB",
                    flush=True,
                )
    row = {
        "num_events": num_events,
        "steps_marked": "in the first repetition" if mark_once else "all",
        "compressed_mib": round(path.stat().st_size / MIB, 1),
        **{name: summary(found, num_events) for name, found in runs.items()},
        "times_faster": round(median_s(runs["hta"]) / median_s(runs["steptune"]), 2),
        "times_faster_by_turn": [
            round(total_s(hta) / total_s(own), 2) for own, hta in zip(runs["steptune"], runs["hta"], strict=False)
        ],
        "memory_share": round(peak_bytes(runs["steptune"]) / peak_bytes(runs["hta"]), 3),
        "command_times_faster": round(median_s(runs["hta"]) / median_s(runs[COMMAND]), 2),
        "whole_times_faster": round(process_s(runs["hta"]) / process_s(runs[COMMAND]), 2),
        "command_memory_share": round(peak_bytes(runs[COMMAND]) / peak_bytes(runs["hta"]), 3),
        "hta_versions": runs["hta"][0]["versions"],
    }
    print(f"{num_events:>9} events: {row['times_faster']} times faster, {row['memory_share']:.0%} of HTA's memory")
    print(
        f"           command: {row['command_times_faster']} times, {row['whole_times_faster']} with HTA's imports, "
        f"{row['command_memory_share']:.0%}",
        flush=True,
    )
    return row


def ask(command: list[str], path: Path) -> dict:
    """One run in a process of its own.

    Raises:
        RuntimeError: It failed; its last words are in the message.
    """
    printed, process = whole(command, path)
    return {**process, **json.loads(printed.splitlines()[-1])}


def whole(command: list[str], path: Path) -> tuple[str, dict]:
    """Run a command as users start it: its output, its time from start to end, and its peak memory.

    Raises:
        RuntimeError: It failed; its last words are in the message.
    """
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        environment = own_environment(path.parent) if command[0] == sys.executable else None
        began = time.perf_counter()
        process = subprocess.Popen([*command, str(path)], stdout=printed, stderr=errors, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {errors.read()[-2000:]}")
        return printed.read(), {
            "seconds": {"command": process_s},
            "process_s": process_s,
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss * 1024,
        }


def own_environment(cache: Path) -> dict[str, str]:
    """The environment of a process that imports Steptune, with bytecode in the cache folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([str(ROOT / "src"), str(HERE)])
    return {**kept, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(cache / "bytecode")}


def repeated(source: Path, cache: Path, size: int, *, mark_once: bool) -> tuple[Path, int]:
    """The file of at least this many events, made once; by another process, so that this one stays small."""
    path = cache / f"{source.name.removesuffix('.json.gz')}_{size}{'_once' if mark_once else ''}.json.gz"
    count = path.with_suffix(".count")
    if not count.exists():
        command = [
            sys.executable,
            str(HERE / "repeated_trace.py"),
            str(source),
            str(path),
            str(size),
            *["once"] * mark_once,
        ]
        count.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return path, int(count.read_text())


def hta_python(cache: Path) -> Path:
    """The interpreter of an environment that has HTA."""
    folder = cache / HTA.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-I", "-m", "pip", "install", "--quiet", HTA], check=True)
        (folder / "complete").touch()
    return python


def summary(runs: list[dict], num_events: int) -> dict:
    totals = [total_s(run) for run in runs]
    return {
        "median_s": round(statistics.median(totals), 3),
        "min_s": round(min(totals), 3),
        "max_s": round(max(totals), 3),
        "num_runs": len(runs),
        "process_s": round(process_s(runs), 3),
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 3),
        "events_per_s": round(num_events / statistics.median(totals)),
        "ns_per_event": round(1e9 * statistics.median(totals) / num_events),
        "stages_s": {
            stage: round(statistics.median(run["seconds"][stage] for run in runs), 3) for stage in runs[0]["seconds"]
        },
        "peak_mib": round(peak_bytes(runs) / MIB),
        **({"compute_percent": runs[0]["compute_percent"]} if "compute_percent" in runs[0] else {}),
    }


def total_s(run: dict) -> float:
    return sum(run["seconds"].values())


def median_s(runs: list[dict]) -> float:
    return statistics.median(map(total_s, runs))


def process_s(runs: list[dict]) -> float:
    """Median time of the whole process."""
    return statistics.median(run["process_s"] for run in runs)


def peak_bytes(runs: list[dict]) -> float:
    return statistics.median(run["peak_bytes"] for run in runs)


def machine() -> dict:
    """Names and numbers of the machine; never its own name or address."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": "shared",
    }


if __name__ == "__main__":
    main()
