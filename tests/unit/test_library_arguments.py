"""Changes as arguments of the library that owns a script's loop: in its text, or on its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from test_script_diff import added, recommended

from steptune.tuner.errors import RecommendationError
from steptune.tuner.records import Choice, Recommendation
from steptune.tuner.scripts.diff import script_diff

TRAINER = """\
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="out", use_cpu=True, dataloader_num_workers=8)
Trainer(model=model, args=arguments, train_dataset=data).train()
"""
AT = {"loader": 4, "optimizer": 4, "model": 4, "step": 4}
PARSED = """\
from transformers import HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_arguments, arguments = parser.parse_args_into_dataclasses()
Trainer(model=model, args=arguments, train_dataset=data).train()
"""
PARSED_AT = dict.fromkeys(AT, 5)
OF_A_CPU = ("python", "train.py", "--use_cpu")
WORKERS: Choice = {"num_workers": 4, "pin_memory": False, "prefetch_factor": 4}
AUTOCAST: Choice = {"level": "O1", "dtype": "bfloat16"}


def run_by(recommendation: Recommendation, *command: str) -> Recommendation:
    """The recommendation for a script that this command runs."""
    assert recommendation.in_script is not None
    script = replace(recommendation.in_script.script, command=command)
    return replace(recommendation, in_script=replace(recommendation.in_script, script=script))


def test_a_trainer_takes_all_as_arguments_in_one_line(tmp_path: Path) -> None:
    recommendation = recommended(
        tmp_path,
        TRAINER,
        AT,
        data_loading=WORKERS,
        precision=AUTOCAST,
        compile={"mode": "default"},
        optimizer_implementation={"implementation": "fused"},
    )

    diff = script_diff(recommendation)

    assert added(diff) == [
        'arguments = TrainingArguments(output_dir="out", use_cpu=True, dataloader_num_workers=4, '
        "dataloader_pin_memory=False, dataloader_prefetch_factor=4, bf16=True, torch_compile=True, "
        "optim='adamw_torch_fused')"
    ]
    assert not diff.left_out


def test_an_argument_that_the_script_gives_is_put_back_to_the_default(tmp_path: Path) -> None:
    diff = script_diff(recommended(tmp_path, TRAINER, AT, data_loading={"num_workers": 0, "pin_memory": True}))

    assert added(diff) == ['arguments = TrainingArguments(output_dir="out", use_cpu=True, dataloader_num_workers=0)']


def test_a_factor_of_prefetching_goes_with_the_workers(tmp_path: Path) -> None:
    """Without workers, `TrainingArguments` refuses one."""
    given = TRAINER.replace("num_workers=8", "num_workers=8, dataloader_prefetch_factor=4")

    diff = script_diff(recommended(tmp_path, given, AT, data_loading={"num_workers": 0}))

    assert "dataloader_num_workers=0, dataloader_prefetch_factor=None" in added(diff)[0]


def test_an_option_that_cannot_be_taken_back_is_no_option(tmp_path: Path) -> None:
    recommendation = recommended(tmp_path, PARSED, PARSED_AT, data_loading={"num_workers": 0})

    with pytest.raises(RecommendationError, match="remove --dataloader_prefetch_factor from the command"):
        script_diff(run_by(recommendation, "python", "train.py", "--dataloader_prefetch_factor=4"))


def test_a_trainer_takes_bf16_on_a_cpu_only_where_it_was_told_of_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(RecommendationError, match="use_cpu"):
        script_diff(recommended(tmp_path, TRAINER.replace("use_cpu=True, ", ""), AT, precision=AUTOCAST))


def test_a_compilation_for_fixed_shapes_has_no_argument(tmp_path: Path) -> None:
    with pytest.raises(RecommendationError, match="cannot express compile_dynamic=False"):
        script_diff(recommended(tmp_path, TRAINER, AT, compile={"mode": "default", "dynamic": False}))


@pytest.mark.parametrize(
    "line",
    [
        "arguments.dataloader_num_workers = 2",
        "arguments = dataclasses.replace(arguments, dataloader_num_workers=2)",
        "arguments = dataclasses.replace(arguments, **overrides)",
        "arguments = arguments.set_dataloader(num_workers=2)",
        "other = TrainingArguments(output_dir='other')",
    ],
)
def test_arguments_that_are_set_in_two_places_are_left_alone(tmp_path: Path, line: str) -> None:
    text = TRAINER.replace("Trainer(model", f"{line}\nTrainer(model")

    with pytest.raises(RecommendationError, match=r"steptune\.enable"):
        script_diff(recommended(tmp_path, text, dict.fromkeys(AT, 5), data_loading=WORKERS))


def test_arguments_from_a_dictionary_are_left_alone(tmp_path: Path) -> None:
    text = TRAINER.replace("dataloader_num_workers=8", "**options")

    with pytest.raises(RecommendationError, match="come from a dictionary"):
        script_diff(recommended(tmp_path, text, AT, data_loading=WORKERS))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(ModelArguments, TrainingArguments)", "ModelArguments"),
        ("Trainer(", "TrainingArguments('elsewhere')\nTrainer("),
        ("parse_args_into_dataclasses()", "parse_dict(settings)"),
        ("parse_args_into_dataclasses()", "parse_args_into_dataclasses(args=['--bf16', 'False'])"),
        ("parse_args_into_dataclasses()", "parse_args_into_dataclasses(); arguments.bf16 = False"),
        ("Trainer(model=model, args=arguments, train_dataset=data).train()", "run(model, arguments)"),
    ],
)
def test_options_that_would_not_reach_the_trainer_are_not_given(tmp_path: Path, before: str, after: str) -> None:
    text = PARSED.replace(before, after)
    recommendation = recommended(tmp_path, text, dict.fromkeys(AT, len(text.splitlines())), precision=AUTOCAST)

    with pytest.raises(RecommendationError, match=r"steptune\.enable"):
        script_diff(run_by(recommendation, *OF_A_CPU))


@pytest.mark.parametrize("of", ["transformers import Seq2SeqTrainingArguments", "trl import SFTConfig"])
def test_options_become_arguments_of_other_trainers(tmp_path: Path, of: str) -> None:
    name = of.rpartition(" ")[2]
    text = PARSED.replace(", TrainingArguments)", f", {name})").replace(", TrainingArguments\n", f"\nfrom {of}\n")
    recommendation = recommended(tmp_path, text, dict.fromkeys(AT, 6), data_loading={"num_workers": 4})

    assert "--dataloader_num_workers 4" in script_diff(run_by(recommendation, *OF_A_CPU)).options


def test_a_script_that_parses_the_arguments_gets_options(tmp_path: Path) -> None:
    recommendation = recommended(tmp_path, PARSED, PARSED_AT, data_loading={"num_workers": 4}, precision=AUTOCAST)

    diff = script_diff(run_by(recommendation, *OF_A_CPU))

    assert not diff.diff
    assert "--dataloader_num_workers 4" in diff.options
    assert "--bf16 True" in diff.options


def test_what_a_trainer_has_no_words_for_is_left_to_enable(tmp_path: Path) -> None:
    with pytest.raises(RecommendationError, match=r"cannot express flush_denormals=True.*steptune\.enable"):
        script_diff(recommended(tmp_path, TRAINER, AT, backend_flags={"flush_denormals": True}))


def test_a_loader_of_the_users_is_changed_at_its_own_line(tmp_path: Path) -> None:
    """The Trainer's arguments are not for it."""
    own = TRAINER.replace("arguments =", "loader = torch.utils.data.DataLoader(data, batch_size=8)\narguments =")
    own = f"import torch\n{own}"
    at = {**dict.fromkeys(AT, 6), "loader": 4}

    diff = script_diff(recommended(tmp_path, own, at, data_loading={"num_workers": 4}))

    assert added(diff) == ["loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=4)"]


@pytest.mark.parametrize(
    ("imported", "call", "expected"),
    [
        ("accelerate import Accelerator", "Accelerator()", "Accelerator(mixed_precision='bf16')"),
        ("lightning import Trainer", "Trainer(max_epochs=1)", "Trainer(max_epochs=1, precision='bf16-mixed')"),
    ],
)
def test_accelerate_and_lightning_take_the_precision(tmp_path: Path, imported: str, call: str, expected: str) -> None:
    text = f"from {imported}\n\nowner = {call}\nmodel = owner.prepare(model)\nmodel(x)\n"

    diff = script_diff(recommended(tmp_path, text, dict.fromkeys(AT, 5), precision=AUTOCAST))

    assert added(diff) == [f"owner = {expected}"]


def test_a_model_that_accelerate_does_not_wrap_has_no_precision_of_its(tmp_path: Path) -> None:
    text = "from accelerate import Accelerator\n\nowner = Accelerator()\nmodel(x)\n"

    with pytest.raises(RecommendationError, match=r"steptune\.enable"):
        script_diff(recommended(tmp_path, text, dict.fromkeys(AT, 4), precision=AUTOCAST))


def test_a_loader_that_accelerate_wraps_brings_the_model_no_precision(tmp_path: Path) -> None:
    text = "from accelerate import Accelerator\n\nowner = Accelerator()\nloader = owner.prepare(loader)\nmodel(x)\n"

    with pytest.raises(RecommendationError, match=r"steptune\.enable"):
        script_diff(recommended(tmp_path, text, dict.fromkeys(AT, 5), precision=AUTOCAST))


ACCELERATED = """\
import torch
from accelerate import Accelerator

loader = torch.utils.data.DataLoader(data, batch_size=8)
loader = Accelerator().prepare(loader)
"""


def accelerated(folder: Path, text: str) -> Recommendation:
    """A choice of workers for a loader that Accelerate has wrapped in the last line."""
    return recommended(folder, text, dict.fromkeys(AT, text.count("\n")), data_loading={"num_workers": 4})


def test_a_loader_that_accelerate_wraps_is_changed_where_the_user_makes_it(tmp_path: Path) -> None:
    diff = script_diff(accelerated(tmp_path, ACCELERATED))

    assert added(diff) == ["loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=4)"]


def test_one_of_several_loaders_is_not_guessed(tmp_path: Path) -> None:
    several = ACCELERATED.replace("loader = A", "others = torch.utils.data.DataLoader(data)\nloader = A")

    with pytest.raises(RecommendationError, match="makes 2 loaders"):
        script_diff(accelerated(tmp_path, several))
