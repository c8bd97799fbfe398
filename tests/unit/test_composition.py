"""Combined choices: normalising, conflicts, and the numerics of a combination."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import sample_environment, sample_facts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import BASELINE, Candidate, Choice, Numerics
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.api import BF16_ROUNDOFF, FP32_ROUNDOFF, TF32_ROUNDOFF, Settings
from steptune.tuner.strategies.combine import (
    CONFLICTS,
    DROPPED,
    TOGETHER,
    complete_choices,
    conflict,
    environment_variables,
    make_plan,
    normalise,
    numerics_of,
    unit_roundoff_of,
)

PLAIN = sample_facts(current={}, host_read="")
USERS = sample_facts(
    current={
        "data_loading": {"num_workers": 4, "persistent_workers": True},
        "precision": {"level": "O1"},
        "compile": {"mode": "default"},
        "micro_batch": {"num_micro_batches": 2},
    }
)
CPU, CUDA = sample_environment("cpu"), sample_environment("cuda")


def values_of(allowed: tuple[Any, ...]) -> Any:
    return st.one_of(*(st.sampled_from(a[:8]) if isinstance(a, range) else st.just(a) for a in allowed))


PARTIAL = {
    s.name: st.fixed_dictionaries({}, optional={name: values_of(allowed) for name, allowed in s.values.items()})
    for s in STRATEGIES
}
CANDIDATES = st.fixed_dictionaries({}, optional=PARTIAL).map(lambda choices: Candidate(choices=choices))
WORKLOADS = st.sampled_from([PLAIN, USERS])
READS = "aten::nonzero (train.py, line 12: mask.nonzero())"


class TestNormalise:
    @given(CANDIDATES, WORKLOADS)
    def test_is_idempotent(self, candidate: Candidate, workload: Any) -> None:
        once = normalise(candidate, workload)
        assert normalise(once, workload) == once

    @given(CANDIDATES, WORKLOADS, st.randoms(use_true_random=False))
    def test_does_not_depend_on_the_order_of_choices(self, candidate: Candidate, workload: Any, random: Any) -> None:
        def shuffled(mapping: dict[str, Any]) -> dict[str, Any]:
            return dict(random.sample(list(mapping.items()), len(mapping)))

        other = Candidate(choices=shuffled({name: shuffled(c) for name, c in candidate.choices.items()}))
        assert normalise(other, workload).key == normalise(candidate, workload).key

    @given(CANDIDATES, WORKLOADS)
    def test_keeps_only_what_differs_from_today(self, candidate: Candidate, workload: Any) -> None:
        for name, choice in normalise(candidate, workload).choices.items():
            neutral = strategy_named(name).neutral(workload)
            assert choice
            assert all(value != neutral[parameter] for parameter, value in choice.items())

    @given(CANDIDATES, WORKLOADS)
    def test_changes_nothing_that_has_a_meaning(self, candidate: Candidate, workload: Any) -> None:
        """Only parameters of a row of DROPPED may end otherwise than they were asked for."""
        asked = complete_choices(candidate, workload)
        kept = complete_choices(normalise(candidate, workload), workload)
        dropped = {
            (row.setting.strategy, name) for row in DROPPED if row.when(Settings(asked)) for name in row.parameters
        }
        for strategy, choice in asked.items():
            for name, value in choice.items():
                assert (strategy, name) in dropped or kept[strategy][name] == value

    def test_what_the_user_runs_today_is_the_baseline(self) -> None:
        assert normalise(Candidate(choices=dict(USERS.current)), USERS) == BASELINE

    def test_a_return_to_the_defaults_is_a_change_for_who_left_them(self) -> None:
        off = Candidate(choices={"compile": {"mode": None}})
        assert normalise(off, USERS).choices == {"compile": {"mode": None}}
        assert normalise(off, PLAIN) == BASELINE

    @pytest.mark.parametrize(
        ("choices", "kept"),
        [
            ({"data_loading": {"num_workers": 0, "prefetch_factor": 4, "persistent_workers": True}}, {}),
            (
                {"data_loading": {"num_workers": 1, "prefetch_factor": 4}},
                {"data_loading": {"num_workers": 1, "prefetch_factor": 4}},
            ),
            ({"compile": {"mode": None, "scope": "regional"}}, {}),
            ({"compile": {"mode": None, "dynamic": True}}, {}),
            ({"precision": {"level": "tf32"}, "backend_flags": {"tf32": True}}, {"precision": {"level": "tf32"}}),
            ({"backend_flags": {"tf32": True}}, {"backend_flags": {"tf32": True}}),
        ],
    )
    def test_drops_what_has_no_meaning(self, choices: dict[str, Choice], kept: dict[str, Choice]) -> None:
        assert normalise(Candidate(choices=choices), PLAIN).choices == kept

    @pytest.mark.parametrize(
        ("choices", "message"),
        [
            ({"warp_drive": {"on": True}}, "no strategy 'warp_drive'"),
            ({"compile": {"speed": 9}}, "compile has no parameter 'speed'"),
            ({"compile": {"mode": "turbo"}}, "compile has no mode 'turbo'.*'max-autotune'"),
            ({"precision": {"level": "O9"}}, "precision has no level 'O9'.*'O1', 'O2', 'O3'"),
        ],
    )
    def test_refuses_what_does_not_exist(self, choices: dict[str, Choice], message: str) -> None:
        with pytest.raises(ChoiceError, match=message):
            normalise(Candidate(choices=choices), PLAIN)


class TestTables:
    def test_rows_name_strategies_parameters_and_reasons(self) -> None:
        for row in DROPPED:
            assert set(row.parameters) <= set(strategy_named(row.setting.strategy).defaults)
            assert row.reason
        pairs: tuple[Any, ...] = (*CONFLICTS, *TOGETHER)
        for pair in pairs:
            assert all(strategy_named(name) for name in pair.strategies)
            assert pair.reason

    def test_workers_and_threads_are_tried_together(self) -> None:
        assert ("data_loading", "cpu_threads") in [row.strategies for row in TOGETHER]


class TestConflict:
    FLASH = Candidate(choices={"attention_backend": {"backend": "flash"}})

    def test_says_which_strategies_and_why(self) -> None:
        reason = conflict(self.FLASH, CUDA, PLAIN)
        assert reason == (
            "attention_backend with precision: flash and cuDNN attention on CUDA require 16-bit inputs: "
            "use precision level O1, O2 or O3"
        )

    def test_is_gone_with_the_other_choice(self) -> None:
        sixteen_bit = self.FLASH.with_choice("precision", {"level": "O1", "dtype": "bfloat16"})
        assert conflict(sixteen_bit, CUDA, PLAIN) is None

    def test_looks_at_what_the_user_runs_today_too(self) -> None:
        assert conflict(self.FLASH, CUDA, USERS) is None

    def test_depends_on_the_hardware(self) -> None:
        assert conflict(self.FLASH, CPU, PLAIN) is None

    @pytest.mark.parametrize("today", ["for_loop", "fused"])
    def test_fused_sgd_on_a_cpu_does_not_update_16_bit_parameters(self, today: str) -> None:
        """Torch's kernel leaves them unchanged: no such candidate, whether the plan has it fused or the user."""
        parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.5, fused=True).step()
        assert parameter.detach().eq(1).all(), "torch is mended: take the row out"
        pure = Candidate(choices={"precision": {"level": "O3", "dtype": "bfloat16"}})
        sgd = replace(PLAIN, optimizer=replace(PLAIN.optimizer, name="SGD", implementation=today))
        assert bool(conflict(pure, CPU, sgd)) == (today == "fused")
        fused = pure.with_choice("optimizer_implementation", {"implementation": "fused"})
        assert "leaves 16-bit parameters unchanged" in str(conflict(fused, CPU, sgd))
        assert conflict(fused, CUDA, sgd) is None
        assert conflict(fused, CPU, PLAIN) is None
        masters = fused.with_choice("precision", {"level": "O2", "dtype": "bfloat16"})
        assert conflict(masters, CPU, sgd) is None

    @pytest.mark.parametrize(
        ("others", "reason"),
        [
            ({"compile": {"mode": "reduce-overhead"}}, "compile with cuda_graph: both record CUDA graphs"),
            ({"compile": {"mode": "max-autotune"}}, "both record CUDA graphs"),
            ({"compile": {"mode": "max-autotune-no-cudagraphs"}}, None),
            ({"compile": {"mode": "default", "scope": "regional"}}, None),
            ({"optimizer_algorithm": {"algorithm": "lars"}}, "reads its learning rate on the host"),
            ({"optimizer_algorithm": {"algorithm": "sm3"}}, "reads its learning rate on the host"),
            ({"optimizer_algorithm": {"algorithm": "adamw"}}, None),
            ({"activation_checkpointing": {"every": 2}}, None),
            ({"precision": {"level": "O1", "dtype": "float16"}}, None),
            ({"micro_batch": {"num_micro_batches": 2}, "optimizer_implementation": {"implementation": "fused"}}, None),
        ],
    )
    def test_a_recorded_step(self, others: dict[str, Choice], reason: str | None) -> None:
        recorded = Candidate(choices={"cuda_graph": {"scope": "step"}, **others})
        found = conflict(recorded, CUDA, PLAIN)
        assert found is None if reason is None else reason in (found or "")
        assert conflict(Candidate(choices=others), CUDA, PLAIN) is None

    def test_a_step_that_reads_from_the_device_is_recorded_compiled_as_a_whole_only(self) -> None:
        """The reason names the operator and the line; what is compiled may do without them, which a trial shows."""
        reading = replace(PLAIN, host_read=READS)
        recorded = Candidate(choices={"cuda_graph": {"scope": "step"}})
        for regional in (recorded, recorded.with_choice("compile", {"mode": "default", "scope": "regional"})):
            found = conflict(regional, CUDA, reading)
            assert found is not None
            assert READS in found
        assert conflict(recorded.with_choice("compile", {"mode": "default"}), CUDA, reading) is None
        assert conflict(recorded, CUDA, PLAIN) is None

    def test_a_loss_that_reads_from_the_device_is_recorded_with_a_kernel_that_does_not(self) -> None:
        """Compiling the model leaves the loss as it is."""
        recorded = Candidate(choices={"cuda_graph": {"scope": "step"}})
        compiled = recorded.with_choice("compile", {"mode": "default"})
        model = replace(PLAIN.model, kernel_refusals={"fcos3d": "", "window_attention": ""})
        reading = replace(PLAIN, model=model, host_read=READS, host_read_in_loss=READS)
        for other in (compiled, compiled.with_choice("fused_kernels", {"window_attention": True})):
            assert READS in (conflict(other, CUDA, reading) or "")
        assert conflict(recorded.with_choice("fused_kernels", {"fcos3d": True}), CUDA, reading) is None
        elsewhere = replace(reading, host_read="aten::item (model.py, line 1: x.item())")
        fused = compiled.with_choice("fused_kernels", {"fcos3d": True})
        assert conflict(fused, CUDA, elsewhere) is None
        assert "model.py" in (conflict(recorded.with_choice("fused_kernels", {"fcos3d": True}), CUDA, elsewhere) or "")

    def test_what_reads_for_masks_alone_is_recorded_where_there_are_none(self) -> None:
        recorded = Candidate(choices={"cuda_graph": {"scope": "step"}, "attention_mask": {"is_causal": True}})
        model = replace(PLAIN.model, mask_refusal="")
        masks_alone = replace(PLAIN, model=model, host_read=READS, host_read_beside_masks="")
        assert conflict(recorded, CUDA, masks_alone) is None
        assert READS in (conflict(recorded, CUDA, replace(masks_alone, host_read_beside_masks=READS)) or "")

    @given(WORKLOADS, st.sampled_from([CPU, CUDA]))
    def test_the_baseline_never_conflicts(self, workload: Any, environment: Any) -> None:
        assert conflict(BASELINE, environment, workload) is None


class TestNumericsOf:
    @pytest.mark.parametrize(
        ("choices", "numerics"),
        [
            ({}, Numerics.EXACT),
            ({"dataset_cache": {"where": "memory"}}, Numerics.EXACT),
            ({"dataset_cache": {"where": "memory"}, "data_loading": {"num_workers": 1}}, Numerics.SAMPLING),
            ({"data_loading": {"num_workers": 1}, "cpu_threads": {"num_threads": 1}}, Numerics.ROUNDING),
            ({"precision": {"level": "O2", "dtype": "bfloat16"}}, Numerics.ROUNDING),
            ({"precision": {"level": "O3", "dtype": "bfloat16"}, "data_loading": {"num_workers": 1}}, Numerics.LOSSY),
        ],
    )
    def test_is_the_strongest_of_the_choices(self, choices: dict[str, Choice], numerics: Numerics) -> None:
        assert numerics_of(Candidate(choices=choices), PLAIN) is numerics

    def test_reads_a_difference_from_what_the_user_runs(self) -> None:
        """The level alone, where the dtype is the user's."""
        assert numerics_of(Candidate(choices={"precision": {"level": "O3"}}), USERS) is Numerics.LOSSY


class TestUnitRoundoff:
    def test_is_the_coarsest_with_the_baseline_included(self) -> None:
        tf32 = Candidate(choices={"backend_flags": {"tf32": True}})
        assert unit_roundoff_of(BASELINE, CPU, PLAIN) == FP32_ROUNDOFF
        assert unit_roundoff_of(tf32, CPU, PLAIN) == TF32_ROUNDOFF
        assert unit_roundoff_of(tf32, CPU, USERS) == BF16_ROUNDOFF

    @pytest.mark.parametrize("module", ["Conv2d", "LSTM", "GRU", "RNN"])
    def test_what_cudnn_computes_uses_tf32_by_default(self, module: str) -> None:
        convolves = replace(PLAIN, model=replace(PLAIN.model, module_types={module: 1}))
        assert unit_roundoff_of(BASELINE, CUDA, convolves) == TF32_ROUNDOFF
        assert unit_roundoff_of(BASELINE, CPU, convolves) == FP32_ROUNDOFF


class TestWhatTheUserRuns:
    def test_a_sixteen_bit_level_without_a_dtype_is_bfloat16(self) -> None:
        """Form in the documentation of `current`: {"precision": {"level": "O1"}}."""
        complete = complete_choices(BASELINE, USERS)
        assert complete["precision"] == {"level": "O1", "dtype": "bfloat16"}
        assert make_plan(complete).step.autocast_dtype == "bfloat16"

    def test_a_named_dtype_stays(self) -> None:
        facts = sample_facts(current={"precision": {"level": "O1", "dtype": "float16"}})
        assert complete_choices(BASELINE, facts)["precision"]["dtype"] == "float16"


class TestPlan:
    def test_collects_from_all_strategies(self) -> None:
        candidate = Candidate(
            choices={
                "data_loading": {"num_workers": 3, "prefetch_factor": 4},
                "precision": {"level": "O2", "dtype": "float16"},
                "micro_batch": {"num_micro_batches": 4},
                "optimizer_implementation": {"implementation": "fused"},
            }
        )
        plan = make_plan(complete_choices(candidate, PLAIN))
        assert (plan.loader.num_workers, plan.loader.capacity) == (3, 12)
        assert (plan.optimizer.master_weights, plan.optimizer.implementation) == (True, "fused")
        assert (plan.step.loss_scaler, plan.step.num_micro_batches) == (True, 4)

    def test_variables_for_the_launch_come_from_the_choices(self) -> None:
        bound = complete_choices(Candidate(choices={"cpu_threads": {"bind": "close"}}), PLAIN)
        assert environment_variables(bound) == {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
        assert environment_variables(complete_choices(BASELINE, PLAIN)) == {}


class TestOtherPackages:
    """Strategies that are installed in one of two places only."""

    def test_one_that_is_not_here_is_no_trial_without_it(self) -> None:
        choices = {**complete_choices(BASELINE, PLAIN), "gc_pause": {"paused": True}}
        with pytest.raises(ChoiceError, match="gc_pause"):
            make_plan(choices)

    def test_one_that_is_here_only_changes_nothing(self) -> None:
        choices = complete_choices(BASELINE, PLAIN)
        del choices["local_sgd"]
        assert make_plan(choices).environment == []
