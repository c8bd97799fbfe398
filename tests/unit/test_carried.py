"""The part of a gain that an export says it carries."""

from __future__ import annotations

import pytest
from export_builders import on_gpus, sharded
from msgspec import structs
from report_builders import make_recommendation, without_gain

from steptune.tuner.export import exporter_named
from steptune.tuner.export.carried import carried
from steptune.tuner.records import Candidate, Interval, Part, Recommendation, SampleUnit


def recommended(cache_gain: float | None = 1.6) -> Recommendation:
    """An answer of three parts at 2.42, with the contribution of the cache."""
    choices = {
        "data_loading": {"num_workers": 2},
        "dataset_cache": {"where": "memory"},
        "device_prefetch": {"ahead": True},
    }
    gains = {"data_loading": 1.5, "dataset_cache": cache_gain, "device_prefetch": 1.21}
    parts = tuple(
        Part(
            strategy=name,
            choice=choices[name],
            gain=gain,
            interval=None if gain is None else Interval(low=gain - 0.05, high=gain + 0.05),
            num_blocks=0 if gain is None else 4,
            bound=0.5,
            numerics="exact",
            reason="waits for data",
        )
        for name, gain in gains.items()
    )
    return make_recommendation(Candidate(choices=choices), parts=parts)


def test_with_nothing_left_out_it_is_all_of_the_gain() -> None:
    assert carried(recommended(), ()) == "carries all of the gain of 2.42×"


def test_without_a_part_it_is_the_gain_over_its_contribution() -> None:
    said = carried(recommended(), ("device_prefetch",))
    assert said.startswith("carries about 2.00× of 2.42×: without device_prefetch (1.21×)")
    assert said.endswith("steptune.apply with the Workload carries all")


def test_what_needs_a_part_is_not_left_out_twice() -> None:
    answer = recommended()
    cache = structs.replace(answer.parts[1], together=("device_prefetch",))
    answer = structs.replace(answer, parts=(answer.parts[0], cache, answer.parts[2]))
    said = carried(answer, ("dataset_cache", "device_prefetch"))
    assert said.startswith(
        "carries about 1.51× of 2.42×: without dataset_cache (1.60× with device_prefetch, which needs it), device_"
    )


def test_a_contribution_that_was_not_measured_makes_it_a_bound() -> None:
    said = carried(recommended(cache_gain=None), ("dataset_cache", "device_prefetch"), way="steptune.enable")
    assert said.startswith("carries at most 2.00× of 2.42×: without dataset_cache (not measured), device_prefetch")
    assert said.endswith("steptune.enable carries all")


def test_a_contribution_that_may_be_none_is_no_bound() -> None:
    """It was measured: what the file lacks is known to be small, not unknown."""
    said = carried(recommended(cache_gain=1.01), ("dataset_cache", "device_prefetch"))
    assert said.startswith(
        "carries about 2.00× of 2.42×: without dataset_cache (none proven: 0.960× to 1.060×), device"
    )


def test_without_all_parts_it_is_nothing() -> None:
    assert carried(recommended(), ("data_loading", "dataset_cache", "device_prefetch")).startswith("carries none")


def test_a_part_that_is_made_otherwise_is_named() -> None:
    said = carried(recommended(), (), ("data_loading",))
    assert said.endswith("data_loading applied differently from the measured run")


def test_no_claim_has_no_parts() -> None:
    assert carried(without_gain(), ("data_loading",)) == ""


def test_a_cache_in_memory_arrives_in_every_loop_of_python_and_a_prefetcher_in_none() -> None:
    for name in ("accelerate_python", "transformers", "lightning"):
        exporter = exporter_named(name)
        assert exporter.lost(recommended()) == ("device_prefetch",)
        assert "This carries about 2.00x of 2.42x" in exporter.export(recommended())
    assert set(exporter_named("deepspeed").lost(recommended())) == set(recommended().candidate.choices)


def test_what_the_other_file_of_a_target_says_is_not_lost() -> None:
    """The YAML has no key for the loader; the settings in code beside it say it."""
    assert exporter_named("accelerate").lost(recommended()) == ("device_prefetch",)


def test_what_neither_file_of_a_target_says_is_lost_in_both() -> None:
    """FSDP takes no hook of DDP: no code says the compression, and the YAML has no key for it."""
    compressing = {"gradient_compression": {"method": "bf16", "rank": None}}
    full = sharded("full")
    recommendation = structs.replace(
        full,
        candidate=full.candidate.with_choice("gradient_compression", compressing["gradient_compression"]),
        choices={**full.choices, **compressing},
    )
    for name in ("accelerate", "accelerate_fsdp1", "accelerate_python"):
        assert "gradient_compression" in exporter_named(name).lost(recommendation)


def test_what_the_other_file_makes_otherwise_is_named_by_both() -> None:
    recommendation = structs.replace(on_gpus(micro_batch={"num_micro_batches": 2}), sample_unit=SampleUnit.TOKEN)
    for name in ("accelerate", "accelerate_python"):
        assert exporter_named(name).lost(recommendation) == ()
        assert exporter_named(name).otherwise(recommendation) == ("micro_batch",)


@pytest.mark.parametrize(
    ("mode", "lost"), [("full", []), ("hybrid", []), ("zero1", ["activation_checkpointing", "sharding"])]
)
def test_code_beside_a_yaml_that_is_refused_does_not_send_the_reader_there(mode: str, lost: list[str]) -> None:
    code = exporter_named("accelerate_python")
    assert sorted(code.lost(sharded(mode))) == lost
    assert any("export deepspeed" in sentence for sentence in code.not_expressible(sharded(mode))) == bool(lost)


def test_steptunes_own_formats_carry_everything() -> None:
    assert exporter_named("json").carries(recommended()) == "carries all of the gain of 2.42×"
