"""The live line of a study that runs, as a person sees it."""

from rich.console import Console, Group

from steptune.service.cli.live import draw
from steptune.service.progress import Picture, Publisher, data_of, view_of
from steptune.tuner.records import Decision
from steptune.tuner.search.view import StudyView


def _lines(view: StudyView) -> list[str]:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(Group(draw(view)))  # printed by itself, a text loses that it does not wrap
    return capture.get().splitlines()


def _view(*, spent_before_s: float = 0.0) -> StudyView:
    return StudyView(budget_s=90.0, spent_before_s=spent_before_s, clock=lambda: 0.0)


def test_it_is_one_line_however_long_its_parts_are() -> None:
    view = _view()
    view.stage, view.current, view.best_gain = "move", "compile: mode=default, " * 20, 0.31
    view.best_label = "data_loading: num_workers=4, " * 20

    (line,) = _lines(view)

    assert line.startswith("1 min 30 s of 1 min 30 s left")
    assert "best 1.31× data_loading" in line
    assert line.endswith("…")


def test_it_says_what_is_tried_now() -> None:
    view = _view()
    view.stage, view.current = "move", "compile: mode=default"

    (line,) = _lines(view)

    assert line.endswith("now move: compile: mode=default")


def test_both_sides_of_a_limit_count_the_same() -> None:
    """Two of the five trials took turns with others for comparison."""
    view = _view()
    view.num_trials, view.num_searched, view.max_trials = 5, 3, 3
    assert any("3 of 3 trials done, 5 with companions" in line for line in _lines(view))
    view.max_trials = None
    assert any("5 trials done" in line for line in _lines(view))


def test_what_was_spent_before_a_restart_is_not_left() -> None:
    assert any("30 s of 1 min 30 s" in line for line in _lines(_view(spent_before_s=60.0)))


def test_a_remote_watcher_sees_the_same_time_left() -> None:
    assert view_of(data_of(_view(spent_before_s=60.0))).spent_before_s == 60.0


def test_a_view_of_an_older_worker_can_be_read() -> None:
    data = data_of(_view())
    del data["spent_before_s"]
    assert view_of(data).budget_s == 90.0


def test_a_watcher_is_told_of_the_last_move_before_all_that_was_not_tried() -> None:
    """A search that ends decides of its last trial, and of everything that is left, in one go."""
    told: list[dict] = []
    publish, view = Publisher(told.append, interval_s=-1.0), _view()
    view.decisions = (Decision(sequence=1, stage="baseline", verdict="measured", reason="2 starts"),)
    publish(view)
    left = [Decision(sequence=number, stage="end", verdict="not_tried", reason="unlikely") for number in range(3, 20)]
    view.decisions += (Decision(sequence=2, stage="moves", verdict="accepted", reason="faster"), *left)
    publish(view)
    view.decisions += (Decision(sequence=20, stage="end", verdict="ended", reason="nothing is left"),)
    publish(view)
    picture = Picture()
    seen = [picture.after(data) for data in told]
    tried = [decision.sequence for decision in seen[-1].decisions if decision.verdict != "not_tried"]
    assert tried == [1, 2, 20]


def test_an_event_tells_only_the_news_and_a_watcher_has_all_of_it() -> None:
    """A study tells of itself for hours: its decisions would be most of what a database holds of it."""
    told: list[dict] = []
    publish, view = Publisher(told.append, interval_s=-1.0), _view()
    view.decisions = (Decision(sequence=1, stage="baseline", verdict="measured", reason="2 starts"),)
    publish(view)
    view.activity = "measuring"
    publish(view)
    view.decisions += (Decision(sequence=2, stage="moves", verdict="accepted", reason="faster"),)
    publish(view)
    assert [[decision["sequence"] for decision in data.get("decisions", ())] for data in told] == [[1], [], [2]]
    picture = Picture()
    seen = [picture.after(data) for data in told]
    assert seen[1].activity == "measuring"
    assert [len(view.decisions) for view in seen] == [1, 1, 2]
