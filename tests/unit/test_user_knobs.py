"""A workload's own knobs: what may be one, where it becomes a choice, and where it arrives."""

import msgspec
import pytest
from builders import sample_environment, sample_facts, sample_recommendation
from tiny_workloads import Line

from steptune.service.api.requests import StudyRequest
from steptune.tuner.errors import ChoiceError, RecommendationError, WorkloadRejectedError
from steptune.tuner.export import EXPORTERS, exporter_named
from steptune.tuner.export.apply import apply
from steptune.tuner.export.native import load_recommendation
from steptune.tuner.records import BASELINE, Candidate, KnobFacts, Numerics, StudySettings, WorkloadFacts
from steptune.tuner.search.grid import Grid
from steptune.tuner.search.space import Space
from steptune.tuner.strategies.combine import complete_choices, make_plan, normalise, numerics_of
from steptune.tuner.workloads.knobs import is_read, knobs_of
from steptune.tuner.workloads.validation import validate

CHUNK = KnobFacts(name="chunk", today=2, values=(1, 4), ordered=True)
KIND = KnobFacts(name="kind", today="a", values=("b",), recipe=True)
FACTS = sample_facts(current={}, knobs=(CHUNK, KIND))


def declared(knobs, recipe_knobs=None, **attributes):
    """A workload with these attributes that names these knobs."""
    return type("Mine", (Line,), {"knobs": knobs, "recipe_knobs": recipe_knobs or {}, **attributes})()


def space(**settings):
    return Space(sample_environment("cpu"), FACTS, StudySettings(**settings))


class TestDeclaring:
    def test_today_is_what_the_attribute_is(self):
        mine = declared({"chunk": (1, 2, 4)}, {"kind": ["a", "b"]}, chunk=2, kind="a")
        assert knobs_of(mine) == (CHUNK, KIND)

    def test_an_argument_of_the_constructor_may_set_it(self):
        class Mine(Line):
            knobs = {"chunk": (1, 2)}  # noqa: RUF012

            def __init__(self, chunk=1):
                super().__init__()
                self.chunk = chunk

        assert [knobs_of(Mine(chunk))[0].today for chunk in (1, 2, 3)] == [1, 2, 3]

    @pytest.mark.parametrize(
        ("values", "today", "ordered"),
        [((1, 2, 4), 2, True), ({1, 2, 4}, 2, False), (range(1, 4), 2, True), (("x", "y"), "x", False)],
    )
    def test_numbers_are_ordered_unless_they_are_a_set(self, values, today, ordered):
        (knob,) = knobs_of(declared({"chunk": values}, chunk=today))
        assert knob.ordered is ordered
        assert set(knob.values) == {*values} - {today}

    def test_true_is_another_value_than_one(self):
        (knob,) = knobs_of(declared({"chunk": (True, 1)}, chunk=1))
        assert knob.values == (True,)

    @pytest.mark.parametrize(
        ("knobs", "attributes", "complaint"),
        [
            ([1, 2], {}, r"Mine.knobs is \[1, 2\]: it must map attributes to their values"),
            ({"chunk": 4}, {"chunk": 2}, r"Mine.knobs\['chunk'\] is 4: it must be a tuple of values"),
            ({"chunk": "abc"}, {"chunk": "a"}, "is 'abc': it must be a tuple of values"),
            ({"chunk": (1, [2])}, {"chunk": 1}, r"has the value \[2\]: values must be finite numbers"),
            ({"chunk": (1.0, float("inf"))}, {"chunk": 1.0}, "has the value inf"),
            ({"chunk": (2,)}, {"chunk": 2}, "has no value other than today's, 2"),
            ({"chunk": ()}, {"chunk": 2}, "has no value other than today's, 2"),
            ({"chunk": range(100)}, {"chunk": 2}, "has 100 values: name at most 64"),
            ({"chunk": (1, 2)}, {}, "Mine.chunk does not exist: set it to the value that you use today"),
            ({"chunk": (1, 2)}, {"chunk": [1]}, r"which is \[1\] today: a knob must be a finite number"),
            ({"chunk": (1, 2)}, {"chunk": property(lambda self: 1)}, "a property: a knob must be a plain attribute"),
            ({"global_batch": (8, 16)}, {}, "which every workload has"),
            ({"_chunk": (1, 2)}, {"_chunk": 1}, "whose name begins with a letter"),
            ({3: (1, 2)}, {}, "names 3: a knob must be an attribute"),
        ],
    )
    def test_what_is_none_is_refused_in_words(self, knobs, attributes, complaint):
        with pytest.raises(WorkloadRejectedError, match=complaint):
            validate(declared(knobs, **attributes))

    def test_one_name_is_not_in_both(self):
        with pytest.raises(WorkloadRejectedError, match=r"'chunk' is declared in both .*recipe_knobs and `knobs`"):
            validate(declared({"chunk": (1, 2)}, {"chunk": (1, 2)}, chunk=1))

    def test_facts_of_it_survive_storing(self):
        assert msgspec.json.decode(msgspec.json.encode(FACTS), type=WorkloadFacts) == FACTS


class TestChoices:
    def test_every_value_is_a_move_and_recipes_need_consent(self):
        moves = [m for m in space().moves if m.strategy.startswith("knobs.")]
        assert [m.choice for m in moves] == [{"value": 1}, {"value": 4}]
        (left_out,) = [e for e in space().excluded if e.move.strategy == "knobs.kind"]
        assert left_out.reason == "is recipe: allow it with --allow recipe"
        allowed = space(allow=(Numerics.RECIPE,))
        assert {"value": "b"} in [m.choice for m in allowed.moves if m.strategy == "knobs.kind"]

    def test_a_recipe_is_a_recipe_and_the_rest_rounds(self):
        assert numerics_of(Candidate(choices={"knobs.chunk": {"value": 4}}), FACTS) is Numerics.ROUNDING
        assert numerics_of(Candidate(choices={"knobs.kind": {"value": "b"}}), FACTS) is Numerics.RECIPE

    @pytest.mark.parametrize("name", ["knobs", "knobs.chunk"])
    def test_they_can_be_the_only_ones_or_be_left_out(self, name):
        assert {m.strategy for m in space(only=(name,)).moves} == {"knobs.chunk"}
        assert "knobs.chunk" not in {m.strategy for m in space(skip=(name,)).moves}
        assert StudyRequest(workload="zoo:synthetic", only=[name]).settings().only == (name,)

    def test_an_unknown_one_is_refused_once_the_workload_is_known(self):
        with pytest.raises(ChoiceError, match=r"no strategy 'knobs.chunks': did you mean 'knobs.chunk'"):
            space(only=("knobs.chunks",))
        with pytest.raises(ChoiceError, match="the workload defines none"):
            Space(sample_environment("cpu"), sample_facts(current={}), StudySettings(only=("knobs",)))

    def test_today_is_the_baseline(self):
        assert normalise(Candidate(choices={"knobs.chunk": {"value": 2}}), FACTS) == BASELINE
        with pytest.raises(ChoiceError, match=r"knobs.chunk has no value 3; it may be 2, 1, 4"):
            normalise(Candidate(choices={"knobs.chunk": {"value": 3}}), FACTS)

    def test_ordered_ones_are_ordered_for_every_search(self):
        (chunk,) = [p for p in Grid(space(), BASELINE).parameters if p.name == "knobs.chunk"]
        assert [option.get("value", 2) for option in chunk.options] == [2, 1, 4]
        assert list(chunk.ranks) == [0.5, 0.0, 1.0]

    def test_the_plan_has_their_values(self):
        choices = complete_choices(Candidate(choices={"knobs.chunk": {"value": 4}}), FACTS)
        assert make_plan(choices).knobs == {"chunk": 4, "kind": "a"}


class TestReading:
    def test_what_only_the_constructor_reads_is_seen(self):
        class Early(Line):
            def __init__(self):
                super().__init__()
                self.chunk = 1
                self.parts = [self.chunk]

        class Late(Early):
            def loss(self, model, batch):
                return (lambda: self.chunk)() * super().loss(model, batch)

        assert not is_read(Early(), "chunk")
        assert is_read(Late(), "chunk")


def recommended(chunk=4):
    choices = {"knobs.chunk": {"value": chunk}}
    complete = complete_choices(Candidate(choices=choices), FACTS)
    plain = sample_recommendation(
        candidate=Candidate(choices=choices),
        global_batch=Line().global_batch,
        num_ranks=1,
        choices=complete,
        environment_variables={},
    )
    cpu = sample_environment("cpu").hardware
    return msgspec.structs.replace(plain, hardware=cpu)


class TestTakingItAlong:
    @pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda exporter: exporter.name)
    def test_every_export_has_it_or_says_how_to_set_it(self, exporter):
        recommendation = recommended()
        if exporter.refusal(recommendation) is not None:
            return
        text = exporter.export(recommendation)
        missing = [line for line in exporter.not_expressible(recommendation) if "knobs." in line]
        assert "knobs.chunk" in text or "knobs.chunk" in "".join(missing)
        assert not any("kind" in line for line in missing), "what stays as it is needs no word"

    def test_the_native_exports_are_read_back(self):
        for name in ("json", "yaml"):
            assert load_recommendation(exporter_named(name).export(recommended())) == recommended()

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_apply_sets_the_attribute(self):
        mine = declared({"chunk": (1, 2, 4)}, {"kind": ("a", "b")}, chunk=2, kind="a")
        job = apply(recommended(), mine, device="cpu")
        assert (job.workload.chunk, job.workload.kind) == (4, "a")

    def test_apply_refuses_a_workload_without_it(self):
        with pytest.raises(RecommendationError, match=r"sets chunk to 4, but Line does not list chunk in knobs"):
            apply(recommended(), Line(), device="cpu")
