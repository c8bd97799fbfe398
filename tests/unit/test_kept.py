"""Cache of a process, which saves making things again: records by their text, rows of tables, anything up to a size."""

from __future__ import annotations

from builders import failed_result, sample_result, sample_trial

from steptune.dashboards import templating
from steptune.service.kept import Kept
from steptune.service.trial_source import KeptRecords
from steptune.tuner.records import TrialState
from steptune.tuner.store_rules import encode


class TestKept:
    def test_what_was_asked_for_longest_ago_goes_first(self) -> None:
        kept: Kept[str] = Kept(3)
        for key in "abc":
            kept.put(key, key, 1)
        kept.get("a")
        kept.put("d", "d", 1)
        assert [kept.get(key) for key in "abcd"] == ["a", None, "c", "d"]

    def test_a_new_value_takes_the_place_and_the_size_of_the_old(self) -> None:
        kept: Kept[str] = Kept(3)
        kept.put("a", "old", 3)
        kept.put("a", "new", 1)
        kept.put("b", "b", 2)
        assert (kept.get("a"), kept.get("b")) == ("new", "b")

    def test_what_is_larger_than_all_is_made_each_time(self) -> None:
        kept: Kept[str] = Kept(3)
        made: list[str] = []
        for _ in range(2):
            assert kept.get_or_make("a", lambda: made.append("") or "a", 4) == "a"
        assert len(made) == 2


class TestRecords:
    def test_the_same_text_is_the_same_record(self) -> None:
        records, record, result = KeptRecords(), encode(sample_trial()), encode(sample_result())
        trial = records.trial(record, "completed", result)
        assert records.trial(record[:1] + record[1:], "completed", result) is trial
        assert trial.result == sample_result()

    def test_a_trial_that_has_ended_is_another(self) -> None:
        records, record = KeptRecords(), encode(sample_trial())
        states = [records.trial(record, state, None).state for state in ("running", "lost")]
        assert states == [TrialState.RUNNING, TrialState.LOST]
        assert records.trial(record, "failed", encode(failed_result())).result == failed_result()

    def test_memory_ends(self) -> None:
        records = KeptRecords(max_chars=10)
        record = encode(sample_trial())
        assert records.trial(record, "running", None) is not records.trial(record, "running", None)


class TestRows:
    TEMPLATE = """{% macro shown(row, url) %}{{ seen(row) }}<td>{{ row }}</td>{{ url }}{% endmacro -%}
    {% for row in rows %}{{ kept(shown, row, url) }}{% endfor %}"""

    def shown(self, rows: list[str], seen: list[str], url: str = "") -> str:
        template = templating.templates().from_string(self.TEMPLATE)
        return template.render(rows=rows, url=url, seen=lambda row: seen.append(row) or "").strip()

    def test_a_row_is_made_once_and_is_no_markup_of_its_user(self) -> None:
        seen: list[str] = []
        first = self.shown(["<b>", "c"], seen)
        assert first == "<td>&lt;b&gt;</td><td>c</td>"
        assert self.shown(["<b>", "c", "d"], seen) == f"{first}<td>d</td>"
        assert seen == ["<b>", "c", "d"]

    def test_another_argument_is_another_row(self) -> None:
        seen: list[str] = []
        assert self.shown(["e"], seen, "/a") != self.shown(["e"], seen, "/b")
        assert seen == ["e", "e"]
