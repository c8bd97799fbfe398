"""A study as a table and as an Optuna study: every trial is in it, with its figures."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pandas
import pytest
from report_builders import FAILED_COMPILE, make_recommendation, make_story, make_study, make_trials

from steptune.tuner.errors import ChoiceError, MissingDependencyError
from steptune.tuner.estimates import units_per_s
from steptune.tuner.export import trial_table
from steptune.tuner.export.optuna_study import optuna_journal
from steptune.tuner.export.study_formats import STUDY_FORMATS, study_format
from steptune.tuner.records import Trial, TrialState

TRIALS, _ = make_story()
STUDY = make_study()
RUNNING = msgspec.structs.replace(TRIALS[0], trial_id="running", sequence=999, state=TrialState.RUNNING, result=None)


def rate(trial: Trial) -> float:
    return units_per_s(trial.result)


class TestTable:
    def test_every_trial_is_a_row_in_order(self) -> None:
        table = trial_table.trial_table([*TRIALS, RUNNING])
        assert list(table["trial_id"]) == [trial.trial_id for trial in [*TRIALS, RUNNING]]
        assert list(table["state"]) == [trial.state.value for trial in [*TRIALS, RUNNING]]

    def test_rates_and_step_times_are_those_of_the_clean_windows(self) -> None:
        void = msgspec.structs.replace(TRIALS[0].result.windows[0], void="others used the machine", duration_ns=1)
        result = msgspec.structs.replace(TRIALS[0].result, windows=(void, *TRIALS[0].result.windows))
        row = trial_table.trial_table([msgspec.structs.replace(TRIALS[0], result=result)]).iloc[0]
        assert row["units_per_s"] == pytest.approx(rate(TRIALS[0]))
        assert row["step_time_ns"] == pytest.approx(32e9 / rate(TRIALS[0]))
        assert (row["num_windows"], row["num_void_windows"]) == (6, 1)

    def test_a_choice_is_in_the_column_of_its_parameter(self) -> None:
        table = trial_table.trial_table(TRIALS).set_index("trial_id")
        for trial in TRIALS:
            workers = trial.candidate.choices.get("data_loading", {}).get("num_workers")
            found = table.loc[trial.trial_id, "data_loading.num_workers"]
            assert pandas.isna(found) if workers is None else found == str(workers)

    def test_a_failure_is_told_and_has_no_rate(self) -> None:
        table = trial_table.trial_table(TRIALS)
        (row,) = (row for _, row in table.iterrows() if not pandas.isna(row["failure_kind"]))
        assert row["failure_kind"] == FAILED_COMPILE.kind.value
        assert row["failure_message"] == FAILED_COMPILE.message
        assert pandas.isna(row["units_per_s"])

    def test_the_breakdown_sums_to_the_step(self) -> None:
        row = trial_table.trial_table(TRIALS).iloc[0]
        (breakdown,) = TRIALS[0].result.breakdowns
        names = [
            name for name in trial_table.trial_table(TRIALS).columns if name.removesuffix("_ns") in breakdown.rescaled
        ]
        assert sum(row[name] for name in names) == breakdown.unprofiled_step_time_ns

    def test_csv_is_read_back(self) -> None:
        read = pandas.read_csv(io.BytesIO(trial_table.as_csv(TRIALS)))
        assert list(read.columns) == list(trial_table.trial_table(TRIALS).columns)
        assert list(read["units_per_s"].dropna()) == pytest.approx([rate(t) for t in TRIALS if t.result.windows])

    def test_nothing_begun_is_a_table_without_rows(self) -> None:
        read = pandas.read_csv(io.BytesIO(trial_table.as_csv([])))
        assert len(read) == 0
        assert "units_per_s" in read.columns

    def test_a_message_of_several_lines_stays_in_its_row(self) -> None:
        failure = msgspec.structs.replace(FAILED_COMPILE, message='it said "no",\nand =1+1')
        result = msgspec.structs.replace(TRIALS[0].result, failure=failure)
        read = pandas.read_csv(io.BytesIO(trial_table.as_csv([msgspec.structs.replace(TRIALS[0], result=result)])))
        assert list(read["failure_message"]) == [failure.message]

    def test_parquet_keeps_types(self) -> None:
        if not trial_table.has_parquet():
            assert os.environ.get("CI") != "true", "CI installs the extra `parquet`"
            pytest.skip("needs pyarrow: pip install steptune[parquet]")
        read = pandas.read_parquet(io.BytesIO(trial_table.as_parquet([*TRIALS, RUNNING])))
        expected = trial_table.trial_table([*TRIALS, RUNNING])
        assert list(read.columns) == list(expected.columns)
        assert read["sequence"].tolist() == expected["sequence"].tolist()
        assert read["guard_passed"].dtype == expected["guard_passed"].dtype

    def test_parquet_without_its_library_names_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial_table, "has_parquet", lambda: False)
        with pytest.raises(MissingDependencyError, match=r"steptune\[parquet\], or export csv"):
            trial_table.as_parquet(TRIALS)


class TestOptuna:
    @pytest.fixture
    def study(self, tmp_path: Path):
        import optuna
        from optuna.storages.journal import JournalFileBackend

        path = tmp_path / "optuna_study.log"
        path.write_bytes(optuna_journal(STUDY, [*TRIALS, RUNNING]))
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        return optuna.load_study(study_name=STUDY.study_id, storage=storage)

    def test_trials_that_ended_have_their_rate_or_failed(self, study) -> None:
        assert len(study.trials) == len(TRIALS)
        for ours, theirs in zip(TRIALS, study.trials, strict=True):
            assert theirs.user_attrs["trial_id"] == ours.trial_id
            if ours.result.ok:
                assert theirs.value == pytest.approx(rate(ours))
            else:
                assert theirs.state.name == "FAIL"

    def test_the_best_trial_is_ours(self, study) -> None:
        best = max((trial for trial in TRIALS if trial.result.ok), key=rate)
        assert study.best_trial.user_attrs["trial_id"] == best.trial_id
        assert study.best_trial.user_attrs["candidate"] == best.candidate.label

    def test_parameters_are_complete_choices(self, study) -> None:
        """A trial that changes nothing has the values of today, so that trials can be compared."""
        changed = {f"{s}.{p}" for t in TRIALS for s, choice in t.candidate.choices.items() for p in choice}
        for trial in study.trials:
            assert set(trial.params) == changed
        assert study.trials[0].params["data_loading.num_workers"] == 0
        assert study.trials[4].params["data_loading.num_workers"] == 2

    def test_what_the_user_runs_today_is_not_pytorchs_default(self) -> None:
        from export_builders import FACTS

        facts = msgspec.structs.replace(FACTS, current={"data_loading": {"num_workers": 4}})
        text = optuna_journal(make_study(facts=facts), TRIALS).decode()
        first = next(json.loads(line) for line in text.splitlines() if '"trial_id":"trial0001"' in line)
        values = json.loads(first["distributions"]["data_loading.num_workers"])["attributes"]["choices"]
        assert values == [2, 4]
        assert values[int(first["params"]["data_loading.num_workers"])] == 4

    def test_times_are_those_of_the_trial(self, study) -> None:
        for ours, theirs in zip(TRIALS, study.trials, strict=True):
            assert (theirs.datetime_complete - theirs.datetime_start).total_seconds() == ours.result.duration_ns / 1e9

    def test_a_rejected_trial_is_no_best_trial(self) -> None:
        guard = msgspec.structs.replace(TRIALS[0].result.guard, passed=False)
        (rejected,) = make_trials([msgspec.structs.replace(TRIALS[0].result, guard=guard)])
        assert '"state":3' in optuna_journal(STUDY, [rejected]).decode()  # TrialState.FAIL

    def test_the_same_trials_give_the_same_file(self) -> None:
        assert optuna_journal(STUDY, TRIALS) == optuna_journal(STUDY, TRIALS)

    def test_it_names_no_process(self) -> None:
        writers = {json.loads(line)["worker_id"] for line in optuna_journal(STUDY, TRIALS).splitlines()}
        assert writers == {"steptune"}


class TestNames:
    def test_names_of_both_kinds_are_unique(self) -> None:
        from steptune.tuner.export import EXPORTERS

        names = [known.name for known in EXPORTERS] + [known.name for known in STUDY_FORMATS]
        files = [exporter.file_name(make_recommendation()) for exporter in EXPORTERS]
        assert len(set(names)) == len(names)
        assert len({*files, *(known.file_name for known in STUDY_FORMATS)}) == len(names)

    def test_a_format_of_a_recommendation_is_none_of_a_study(self) -> None:
        assert study_format("yaml") is None
        assert study_format("csv") is STUDY_FORMATS[0]

    def test_an_unknown_one_is_refused_with_all_that_exist(self) -> None:
        with pytest.raises(ChoiceError, match=r"no export format 'xlsx'.*json, yaml, python.*csv, parquet, optuna"):
            study_format("xlsx")


def test_optuna_is_imported_for_its_own_format_only() -> None:
    program = (
        "import sys, steptune.tuner.export.study_formats as f, steptune.tuner.export\n"
        "assert not {'optuna', 'pandas', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
