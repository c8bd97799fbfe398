"""The options of `tune` do what they say."""

from command import PATIENT, WORKLOADS

BALANCED = f"{WORKLOADS / 'flawed.py'}:Balanced"


def decisions(shown, verdict, strategy):
    return [
        decision
        for decision in shown["decisions"]
        if decision["verdict"] == verdict and any(move["strategy"] == strategy for move in decision["moves"])
    ]


def tried(shown):
    """Strategies of the configurations that were measured."""
    return {move["strategy"] for decision in shown["decisions"] if decision["trial_ids"] for move in decision["moves"]}


def test_where_nothing_pays_the_baseline_is_recommended(steptune, inside):
    """Also: --only, --trials, --budget, --seed and --json do what they say, and `lossy` needs consent."""
    ended = steptune(
        *("tune", BALANCED, "--budget", "10m", "--trials", "3", "--only", "backend_flags", "--only", "precision"),
        *("--seed", "7", "--json", *PATIENT),
    )
    shown = inside("show", "--json").json
    recommendation, settings = shown["recommendation"], shown["study"]["settings"]
    assert ended.json == recommendation
    assert recommendation["verdict"] == "no_significant_gain"
    assert recommendation["candidate"]["choices"] == {}
    assert recommendation["units_per_s"] == recommendation["baseline_units_per_s"]
    assert (settings["budget_s"], settings["max_trials"], settings["seed"]) == (600, 3, 7)
    assert tried(shown) <= {"backend_flags", "precision"}
    for strategy in ("data_loading", "compile", "optimizer_implementation"):
        assert {d["reason"] for d in decisions(shown, "not_tried", strategy)} == {"left out by --only"}
    assert any("--allow lossy" in d["reason"] for d in decisions(shown, "not_tried", "precision"))
    text = inside("show").out
    assert "No significant gain" in text
    assert "Keep today" in text
    assert "Changes" not in text


def test_skipped_strategies_are_not_tried_and_consent_is_not_asked_for_again(steptune, inside):
    skipped = ("data_loading", "dataset_cache", "compile")
    steptune(
        *("tune", BALANCED, "--budget", "10m", "--trials", "2", "--allow", "lossy", "--allow", "recipe", *PATIENT),
        *("--skip", skipped[0], "--skip", ",".join(skipped[1:])),
    )
    shown = inside("show", "--json").json
    assert shown["study"]["settings"]["allow"] == ["lossy", "recipe"]
    assert not tried(shown) & set(skipped)
    for strategy in skipped:
        assert {d["reason"] for d in decisions(shown, "not_tried", strategy)} == {"left out by --skip"}
    assert not any("--allow" in d["reason"] for d in shown["decisions"])
