"""Do the precision levels train alike? Loss curves of O1, O2 and O3 beside FP32, on four kinds of models.

    python benchmarks/numerics.py                                  # 200 steps each, on the device that there is
    python benchmarks/numerics.py --small                          # tiny shapes, for a CPU
    python benchmarks/numerics.py --plot numerics.html             # draws what the results file holds; or .png

Every run trains from the same initial state on the same batches, as `steptune verify` does. FP32 runs twice, under
two seeds: where a model has dropout, how far these differ is how far two runs of the same training differ. `missing`
is how much of FP32's fall in loss a level has not made after the last step (mean over the last quarter of the steps),
in units of that fall; negative where it fell further.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import msgspec
from engine import Engine, engine
from stamp import RESULTS, hardware, stamp

from steptune.tuner.errors import WorkloadError
from steptune.tuner.guard.curves import last_quarter
from steptune.tuner.records import BASELINE, Choice, StudySettings
from steptune.tuner.trials.training_run import LossCurve, TrainRequest

_SMALL_ENCODER = "hidden_size=64&num_hidden_layers=2&num_attention_heads=2&intermediate_size=128"
_BASE_ENCODER = "hidden_size=768&num_hidden_layers=12&num_attention_heads=12&intermediate_size=3072"
MODELS = {
    "ViT": f"zoo:vit_large?batch=32&{_BASE_ENCODER}",
    "GPT-2": "zoo:gpt2?batch=4&sequence=512",
    "ResNet": "zoo:resnet50?batch=32",
    "LSTM": "zoo:lstm?batch=32",
}
SMALL = {
    "ViT": f"zoo:vit_large?batch=8&{_SMALL_ENCODER}&image_size=32&num_labels=10",
    "GPT-2": "zoo:gpt2?batch=4&sequence=32&n_layer=2&n_embd=64&n_head=2&vocab_size=256&n_positions=32",
    "ResNet": "zoo:resnet50?batch=8&image_size=32&embedding_size=16&hidden_sizes=32,64&depths=2,2&num_labels=10",
    "LSTM": "zoo:lstm?batch=8&sequence=32&vocabulary=256&width=64",
}
SAME = "FP32, another seed"
LEVELS: dict[str, Choice] = {
    "FP32": {"level": "fp32", "dtype": None},
    SAME: {"level": "fp32", "dtype": None},
    "TF32": {"level": "tf32", "dtype": None},
    **{
        f"{level} {short}": {"level": level, "dtype": dtype}
        for level in ("O1", "O2", "O3")
        for short, dtype in (("bf16", "bfloat16"), ("fp16", "float16"))
    },
}


def curve(ready: Engine, precision: Choice, num_steps: int, seed: int) -> LossCurve:
    request = TrainRequest(
        workload=ready.study.workload,
        study_directory=ready.study.directory,
        choices={**ready.space.complete(BASELINE), "precision": precision},
        device=ready.space.environment.hardware.device_kind,
        num_steps=num_steps,
        seed=seed,
    )
    return msgspec.msgpack.decode(ready.runner.task("train", request), type=LossCurve)


def compared(curve: LossCurve, reference: LossCurve) -> dict:
    end, fall = last_quarter(reference.losses), reference.losses[0] - last_quarter(reference.losses)
    missing = (last_quarter(curve.losses) - end) / fall if curve.finite and fall > 0 else None
    return {
        "missing": missing if missing is None else round(missing, 4),
        "finite": curve.finite,
        "skipped_steps": curve.skipped_steps,
        "losses": [round(loss, 5) if math.isfinite(loss) else None for loss in curve.losses],
    }


def train_all(workload: str, num_steps: int) -> dict:
    """All levels on one model, and the machine; of a level that cannot be run here, why not."""
    with engine(workload, StudySettings()) as ready:
        on_cuda = ready.space.environment.hardware.device_kind == "cuda"
        reference = curve(ready, LEVELS["FP32"], num_steps, seed=0)
        levels = {"FP32": compared(reference, reference)}
        for name, precision in LEVELS.items():
            if name in levels or (name == "TF32" and not on_cuda):
                continue
            try:
                levels[name] = compared(curve(ready, precision, num_steps, seed=int(name == SAME)), reference)
            except WorkloadError as error:
                levels[name] = {"failed": str(error)[:300], "missing": None, "skipped_steps": None, "losses": []}
        machine = hardware(ready.space.environment)
    return {"workload": workload, "hardware": machine, "levels": levels}


def plot(report: dict, path: Path) -> None:
    """One panel a model. A picture (.png) needs Chromium and playwright."""
    import plotly.colors
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    models = report["models"]
    figure = make_subplots(rows=2, cols=2, subplot_titles=list(models), vertical_spacing=0.12)
    colours = dict(zip(LEVELS, plotly.colors.qualitative.Safe, strict=False))
    for number, row in enumerate(models.values()):
        for name, level in row["levels"].items():
            trace = go.Scatter(
                y=level["losses"],
                name=name,
                legendgroup=name,
                showlegend=number == 0,
                line={"color": colours[name], "dash": "dot" if "fp16" in name else "solid", "width": 1.2},
            )
            figure.add_trace(trace, row=number // 2 + 1, col=number % 2 + 1)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")
    device = ", ".join(next(iter(models.values()))["hardware"]["devices"])
    figure.update_layout(width=1180, height=860, template="plotly_white", title=f"Loss by precision level on {device}")
    if path.suffix == ".png":
        photograph(figure.to_html(include_plotlyjs=True), path)
    else:
        figure.write_html(path)


def photograph(html: str, path: Path) -> None:
    import shutil

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 880})
        page.set_content(html)
        page.wait_for_selector("svg.main-svg")
        page.screenshot(path=path)
        browser.close()


def kept(path: Path, num_steps: int) -> dict:
    """Models that the results file has already, with as many steps: they may come from several sittings."""
    before = json.loads(path.read_text()) if path.exists() else {}
    return before["models"] if before.get("num_steps") == num_steps else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "numerics.json")
    parser.add_argument("--plot", type=Path, help="draw the results file, and run nothing")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.out.read_text()), arguments.plot)
        return
    report = {
        "question": "share of FP32's fall in loss that each precision level has not made",
        "num_steps": arguments.steps,
        "models": kept(arguments.out, arguments.steps),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/numerics.py", *sys.argv[1:]])
    for name in arguments.only:
        row = train_all((SMALL if arguments.small else MODELS)[name], arguments.steps)
        report["models"][name] = {**stamp(command), **row}
        arguments.out.write_text(json.dumps(report) + "\n")
        shown = {k: (v["missing"], v["skipped_steps"]) for k, v in row["levels"].items()}
        print(name, json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
