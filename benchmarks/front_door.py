"""Gain that a study of a script claims, and gain of the changed script, started as its user starts it.

    python benchmarks/front_door.py                                  # small forms of the scripts, on the CPU
    python benchmarks/front_door.py --gpu                            # real size, on one GPU
    python benchmarks/front_door.py --gpu --only bert_trainer --seconds 360 --out part.jsonl

Scripts of `benchmarks/scripts/` begin with what their users have: bfloat16, torch.compile, the loader of the published
loops. Data and weights are random, and made by the script. For each, `steptune tune --verify ... -- python SCRIPT` runs
in a folder of its own: it ends with the script as `steptune.enable` changes it in turns with the unchanged one. In the
time that is left the script as the diff changes it is started in turns with the unchanged one. Of interest: whether the
intervals overlap, and how far their middles are apart where both are narrow.

One JSON line a script replaces the older one in the results file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
from preparation_share import told as told_of_trial
from stamp import RESULTS, ROOT, hardware, stamp

from steptune.service.connections import create_engine_for
from steptune.service.script_verification import changed_by, verified
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import SteptuneError
from steptune.tuner.export.native import load_recommendation
from steptune.tuner.records import Environment, Interval, MeasureSettings, Recommendation
from steptune.tuner.records.recommendations import Verdict
from steptune.tuner.scripts.diff import script_diff
from steptune.tuner.scripts.look import Look, look_at
from steptune.tuner.scripts.verification import UNCHANGED, ScriptVerification
from steptune.tuner.speeds import answer_of

SCRIPTS = ROOT / "benchmarks" / "scripts"
NAMES = ("bert_trainer", "vit_accelerate", "nano_gpt", "resnet_ema", "ddpm_unet")
ON_CPU = ("slow_files", *NAMES)
TINY = ("--tiny", "--compile", "0")
LIBRARIES = ROOT / ".venv-exports-accelerate" / "bin" / "python"
STUDY_SHARE, VERIFY_SHARE = 0.55, 0.43
"""Shares of a row's seconds for the study, and for verifying its answer."""
PATIENCE = 2.0
"""Multiple of a row's seconds after which its command is ended: one that takes too long says so by its time."""
MOST_BLOCKS = 12
LEAST_LEFT_SHARE = 0.25
"""Least share of a row's seconds in which the diff is verified."""
NARROW, NEAR = 0.02, 0.05
"""Half-width below which the middles of claim and verification are compared, and how far they may be apart."""
WANTED_GAIN, WANTED_ROWS = 1.05, 3
LOG_CHARACTERS = 3000


class RowError(SteptuneError):
    """A row that cannot be measured here; the message says which step of it failed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One script in a folder of its own.

    Attributes:
        work: Where the script stands; results and logs stand beside it.
        began: On the monotonic clock.
        seconds: That all of it may take.
    """

    name: str
    command: tuple[str, ...]
    work: Path
    began: float
    seconds: float

    @property
    def left_s(self) -> float:
        return self.began + self.seconds - time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="real size, on the GPU; default: small, on the CPU")
    parser.add_argument("--only", action="append", choices=ON_CPU, help="this script; may be given again")
    parser.add_argument("--seconds", type=float, help="of each script, verification included; default 360, or 300")
    parser.add_argument("--compile", action="store_true", help="small forms compile, too")
    parser.add_argument("--foreign-load", type=float, default=MeasureSettings().foreign_cpu_share)
    parser.add_argument("--out", type=Path, default=RESULTS / "front_door.jsonl")
    arguments = parser.parse_args()
    for name in arguments.only or (NAMES if arguments.gpu else ON_CPU):
        for line in measured(name, arguments):  # a run that is cut off leaves what it had
            keep(arguments.out, line)
        print(f"{name}: {told(line)}", flush=True)
    summarise(arguments.out, on_gpu=arguments.gpu)


def measured(name: str, arguments: argparse.Namespace) -> Iterator[dict]:
    """One row as a line, again whenever more of it is known; where it could not be measured it says why."""
    began = time.monotonic()
    own = stamp(" ".join(["python", "benchmarks/front_door.py", *sys.argv[1:]]))
    line = {"row": name, "on": "gpu" if arguments.gpu else "cpu", **own}
    with tempfile.TemporaryDirectory(prefix="steptune-front-door-") as folder:
        work = Path(folder) / "work"
        work.mkdir()
        for path in SCRIPTS.glob("*.py"):
            shutil.copyfile(path, work / path.name)
        options = () if arguments.gpu else TINY[:1] if arguments.compile else TINY
        python = sys.executable if arguments.gpu or not LIBRARIES.exists() else str(LIBRARIES)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "compiled")  # a row begins with nothing compiled
        seconds = arguments.seconds or (360.0 if arguments.gpu else 300.0)
        row = Row(name=name, command=(python, f"{name}.py", *options), work=work, began=began, seconds=seconds)
        try:
            for found in figures(row, arguments.foreign_load):
                line |= {**found, "seconds": round(time.monotonic() - began, 1)}
                yield line
        except (SteptuneError, subprocess.SubprocessError) as error:
            yield {**line, "failed": str(error)[-LOG_CHARACTERS:], "seconds": round(time.monotonic() - began, 1)}


def figures(row: Row, foreign_load: float) -> Iterator[dict]:
    """Claim of a script, then one verification after the other."""
    recommendation, found = tuned(row, foreign_load)
    answer = answer_of(recommendation)
    verified_ways: dict[str, dict] = {}
    yield {
        "hardware": hardware(Environment(hardware=recommendation.hardware)),
        "claimed": {"ratio": round(answer.ratio, 4), **interval_of(answer.interval)},
        "verdict": recommendation.verdict.value,
        "changes": [] if recommendation.in_script is None else list(recommendation.in_script.words),
        "environment": dict(recommendation.environment_variables),
        "no_gain": recommendation.verdict is Verdict.NO_SIGNIFICANT_GAIN,
        "verified": verified_ways,
        "tune_seconds": round(time.monotonic() - row.began, 1),
        "spent": seconds_of_study(row.work.parent),
    }
    if recommendation.candidate.is_baseline:
        return
    if found is not None:
        verified_ways["enable"] = told_of(found, recommendation)
        yield {}
    verified_ways["diff"] = verify_diff(row, recommendation, foreign_load)
    yield {}


def tuned(row: Row, foreign_load: float) -> tuple[Recommendation, ScriptVerification | None]:
    """Run `steptune tune --verify -- COMMAND` as a user types it: the recommendation, and its verification if
    it changes the script.
    """
    beside = row.work.parent
    own = ["--database", f"sqlite:///{beside}/studies.db", "--output", str(beside / "results")]
    own += ["--budget", f"{STUDY_SHARE * row.seconds:.0f}s", "--verify", f"{VERIFY_SHARE * row.seconds:.0f}s"]
    own += ["--foreign-load", str(foreign_load)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))),
        "STEPTUNE_DATA_DIRECTORY": str(beside / "data"),
    }
    command = [sys.executable, "-m", "steptune", "tune", *own, "--", *row.command]
    done = subprocess.run(
        command, cwd=row.work, env=variables, capture_output=True, text=True, timeout=PATIENCE * row.seconds
    )
    print(done.stdout, flush=True)
    verification = beside / "results" / "verification.json"
    if done.returncode and not verification.exists():  # with one, the losses differ, which it says itself
        raise RowError(f"`steptune tune` ended with status {done.returncode}: {done.stderr[-LOG_CHARACTERS:]}")
    found = None
    if verification.exists():
        found = msgspec.json.decode(verification.read_bytes(), type=ScriptVerification)
    return load_recommendation(beside / "results" / "steptune.json"), found


def verify_diff(row: Row, recommendation: Recommendation, foreign_load: float) -> dict:
    """The script as the diff changes it beside the unchanged one, in as many starts as the time allows."""
    if row.left_s < LEAST_LEFT_SHARE * row.seconds:
        return {"refused": f"no time was left: {row.left_s:.0f} s"}
    log = row.work.parent / "look.log"
    look, ended = look_at(row.command, row.work, log, UNCHANGED, frozen_seed=0)
    if look is None:
        raise RowError(f"the unchanged script ended with status {ended.status}: {log.read_text()[-LOG_CHARACTERS:]}")
    with closing(look):
        try:
            return beside_unchanged(row, look, recommendation, row.left_s, foreign_load)
        except SteptuneError as error:
            return {"refused": str(error)}


def beside_unchanged(
    row: Row, look: Look, recommendation: Recommendation, longest_s: float, foreign_load: float
) -> dict:
    began = time.monotonic()
    settings = MeasureSettings(foreign_cpu_share=foreign_load)
    with changed_by(recommendation, "diff", row.command) as changed:
        found = verified(
            look, changed, num_blocks=MOST_BLOCKS, settings=settings, say=lambda text: None, longest_s=longest_s
        )
    diff = script_diff(recommendation)
    edited = sum(text.startswith(("-", "+")) for text in diff.diff.splitlines())
    headers = 2 * len(diff.texts)
    line = told_of(found, recommendation)
    line |= {"lines": edited - headers, "options": list(diff.options), "left_out": diff.left_out}
    return {**line, "seconds": round(time.monotonic() - began, 1)}


def seconds_of_study(folder: Path) -> dict:
    """Seconds of the parts of the study in a folder, and of each of its trials."""
    store = SqlStudyStore(create_engine_for(f"sqlite:///{folder}/studies.db"))
    (study,) = store.list_studies()
    events = {event.kind: event.data for event in store.events(study.study_id)}
    reference = events.get("reference_made") or events.get("reference_unfinished") or {}
    trials = [trial for trial in store.trials(study.study_id) if trial.result is not None]
    return {
        "budget_after_look": round(study.settings.budget_s, 1),
        "reference": round(float(reference.get("seconds", 0.0)), 1),
        "trials": [told_of_trial(trial) for trial in trials],
    }


def told_of(found: ScriptVerification, recommendation: Recommendation) -> dict:
    """A verification beside the claim."""
    claimed, own = answer_of(recommendation), found.gain
    line: dict = {
        "ratio": round(own.ratio, 4),
        **interval_of(own.interval),
        "blocks": own.num_blocks,
        "runs": found.runs,
        "same_loss": found.same,
        "loss": found.reason,
        "missing": list(found.missing),
    }
    if claimed.interval is not None:
        low, high = max(claimed.interval.low, own.interval.low), min(claimed.interval.high, own.interval.high)
        line["overlap"] = low <= high
        widths = [(each.high - each.low) / (each.high + each.low) for each in (claimed.interval, own.interval)]
        line["apart"] = round(abs(own.ratio / claimed.ratio - 1), 4)
        line["within_5_percent"] = line["apart"] <= NEAR if max(widths) < NARROW else None
    return line


def interval_of(interval: Interval | None) -> dict:
    if interval is None:
        return {"interval": None}
    return {"interval": [round(interval.low, 4), round(interval.high, 4)], "level": round(interval.level, 3)}


def told(line: Mapping) -> str:
    """A line for people."""
    if "failed" in line:
        return f"failed: {line['failed']}"
    if not line["verified"]:
        return f"{line['verdict']}, in {line['seconds']} s"
    parts = [f"claimed {line['claimed']['ratio']:.3f} {line['claimed']['interval']}"]
    for way, found in line["verified"].items():
        words = f"{found['ratio']:.3f} {found['interval']}, {found['loss']}" if "ratio" in found else found["refused"]
        parts.append(f"{way} {words}")
    return "; ".join([*parts, ", ".join(line["changes"]), f"{line['seconds']} s"])


def lowest(line: Mapping) -> float | None:
    """Lower end of the verified interval by `enable`; 1.0 where a search found no gain, None without a verification."""
    if line.get("no_gain"):
        return 1.0
    found = line.get("verified", {}).get("enable", {})
    return found["interval"][0] if found.get("interval") and found["same_loss"] else None


def keep(path: Path, line: Mapping) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    others = [old for old in lines_of(path) if (old["row"], old["on"]) != (line["row"], line["on"])]
    path.write_text("".join(json.dumps(each) + "\n" for each in [*others, line]))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def summarise(path: Path, *, on_gpu: bool) -> None:
    rows = {line["row"]: line for line in lines_of(path) if (line["on"] == "gpu") == on_gpu}
    ends = {name: end for name, line in rows.items() if (end := lowest(line)) is not None}
    won = sum(end > WANTED_GAIN for end in ends.values())
    below = [name for name, end in ends.items() if end < 1.0]
    print(f"{won} of {len(rows)} scripts: verified interval above {WANTED_GAIN}; {len(below)}: it begins below 1")
    if on_gpu:
        reached = won >= WANTED_ROWS and not below and set(ends) == set(NAMES)
        print(f"wanted: {WANTED_ROWS} of {len(NAMES)}, and none below 1.00: {'reached' if reached else 'NOT reached'}")


if __name__ == "__main__":
    main()
