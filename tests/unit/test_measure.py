"""Windows of a running job: which samples they hold, and when they count."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import psutil
import pytest
import torch
from guarded import Guarded, neutral_choices
from torch.utils.data import Dataset, IterableDataset

from steptune.tuner.records import DeviceReading
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.loader import build_loader
from steptune.tuner.trials import measure
from steptune.tuner.trials.contention import CpuReading
from steptune.tuner.trials.device_state import why_void
from steptune.tuner.trials.device_watch import DeviceWatch
from steptune.tuner.trials.measure import QUEUES_PER_WINDOW, Stepper, epoch_restart_ns, take_window
from steptune.tuner.workloads.batches import EndlessBatches

NUM_BATCHES = 12
BATCHES = [[4 * number + k for k in range(4)] for number in range(NUM_BATCHES)]


class Numbered(Dataset):
    """A sample says which one it is."""

    def __len__(self) -> int:
        return 4 * NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), float(index)), index % 4


class Recorded(Guarded):
    """Remembers the first index of every batch that was stepped on."""

    global_batch = 4

    def __init__(self) -> None:
        self.seen: list[int] = []

    def dataset(self) -> Any:
        return Numbered()

    def batch_transform(self, batch: Any) -> Any:
        self.seen.append(int(batch[0][0, 0]) // 4)
        return batch


class Tokens(Recorded):
    sample_unit = "token"

    def num_units(self, batch: Any) -> int:
        return int(batch[1].sum()) + 1


@pytest.fixture
def make_stepper() -> Iterator[Callable[..., Stepper]]:
    made: list[Stepper] = []

    def make(workload: Recorded | None = None, **loading: Any) -> Stepper:
        order = EndlessBatches(BATCHES)
        plan = make_plan(neutral_choices(data_loading=loading))
        job = assemble(workload or Recorded(), plan, device=torch.device("cpu"), batch_sampler=order)
        made.append(Stepper(job, order))
        return made[-1]

    yield make
    for stepper in made:
        stepper.resume()
        del stepper.iterator


def window(stepper: Stepper, position: int = 0, num_steps: int = 3, limit: float = 1e9, **options: Any) -> Any:
    return take_window(stepper, round_number=7, position=position, num_steps=num_steps, foreign_limit=limit, **options)


class TestSamples:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_every_window_of_a_position_holds_the_same_samples(
        self, make_stepper: Callable[..., Stepper], workers: int
    ) -> None:
        """Batches of the old position that the loader still holds are consumed before the clock starts."""
        stepper = make_stepper(num_workers=workers)
        for position in (5, 0, 5):
            taken = window(stepper, position)
            seen = cast(Any, stepper.job.workload).seen[-taken.num_steps :]
            assert seen == [(position + k) % NUM_BATCHES for k in range(taken.num_steps)]
            assert taken.position == position

    def test_the_order_has_no_end(self, make_stepper: Callable[..., Stepper]) -> None:
        stepper = make_stepper()
        window(stepper, NUM_BATCHES - 1, 4)
        assert cast(Any, stepper.job.workload).seen == [NUM_BATCHES - 1, 0, 1, 2]

    def test_samples_and_units_are_counted_from_the_batches(self, make_stepper: Callable[..., Stepper]) -> None:
        """Tokens without padding: labels 0 1 2 3 and one make seven of each batch."""
        plain, tokens = window(make_stepper()), window(make_stepper(Tokens()))
        assert (plain.num_samples, plain.num_units) == (12, 12)
        assert (tokens.num_samples, tokens.num_units) == (12, 21)

    def test_an_iterable_dataset_begins_its_next_epoch(self) -> None:
        class Stream(IterableDataset):
            def __iter__(self) -> Iterator[Any]:
                return iter([(torch.zeros(16), 0)] * 8)

        class Streamed(Recorded):
            def dataset(self) -> Any:
                return Stream()

        job = assemble(Streamed(), make_plan(neutral_choices()), device=torch.device("cpu"))
        assert window(Stepper(job, None), num_steps=5).num_samples == 20


class TestWindow:
    def test_times_are_those_of_its_steps(self, make_stepper: Callable[..., Stepper]) -> None:
        taken = window(make_stepper(), num_steps=6)
        assert taken.round == 7
        assert taken.num_steps == 6
        assert 0 < taken.step_p20_ns <= taken.step_p50_ns <= taken.step_p80_ns <= taken.duration_ns
        assert (taken.queue_depth_start, taken.queue_depth_end) == (0, 0)

    def test_spans_several_queues_where_the_loader_is_behind(
        self, make_stepper: Callable[..., Stepper], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepper = make_stepper(num_workers=1, prefetch_factor=3)
        monkeypatch.setattr(measure, "ready_batches", lambda iterator: 0)
        assert window(stepper, num_steps=2).num_steps == QUEUES_PER_WINDOW * 3

    def test_is_as_short_as_asked_where_the_loader_is_ahead(
        self, make_stepper: Callable[..., Stepper], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepper = make_stepper(num_workers=1, prefetch_factor=3)
        monkeypatch.setattr(measure, "ready_batches", lambda iterator: 3)
        assert window(stepper, num_steps=2).num_steps == 2

    def test_all_ranks_take_as_many_steps_as_the_one_that_wants_most(
        self, make_stepper: Callable[..., Stepper]
    ) -> None:
        assert window(make_stepper(), num_steps=2, most=lambda values: [values[0] + 3, *values[1:]]).num_steps == 5

    def test_times_are_those_of_the_slowest_rank(self, make_stepper: Callable[..., Stepper]) -> None:
        slow = 10**12

        def most(values: Sequence[float]) -> Sequence[float]:
            return values if len(values) == 1 else [value + slow for value in values]

        taken = window(make_stepper(), most=most)
        assert slow < taken.step_p20_ns <= taken.step_p50_ns <= taken.step_p80_ns < 2 * slow
        assert slow < taken.duration_ns < 2 * slow

    @pytest.mark.parametrize(("limit", "void"), [(0.10, "other programs used 25% of the cores"), (0.30, None)])
    def test_is_void_where_others_used_the_processor(
        self, make_stepper: Callable[..., Stepper], monkeypatch: pytest.MonkeyPatch, limit: float, void: str | None
    ) -> None:
        monkeypatch.setattr(measure, "read_cpu", lambda now: CpuReading(busy_s=0, own_s=0, at_s=now))
        monkeypatch.setattr(measure, "foreign_share", lambda *readings: 0.25)
        taken = window(make_stepper(), limit=limit)
        assert taken.void == void
        assert taken.foreign_cpu_share == 0.25

    @pytest.mark.parametrize(
        ("reading", "others", "void"),
        [
            (DeviceReading(sm_clock_mhz=1755), 0, None),
            (DeviceReading(slowed_share=0.5), 0, "the device was slowed down by heat for 50% of the window"),
            (DeviceReading(sm_clock_mhz=1755), 1, "the device of another rank was throttled or shared"),
        ],
    )
    def test_is_void_where_a_device_was_throttled(
        self, make_stepper: Callable[..., Stepper], reading: DeviceReading, others: int, void: str | None
    ) -> None:
        class Watch(DeviceWatch):
            def end(self) -> tuple[DeviceReading, str | None]:
                return reading, why_void(reading, None)

        taken = window(make_stepper(), watch=Watch(), total=lambda values: [*values[:3], values[3] + others])
        assert (taken.void, taken.device) == (void, reading)

    def test_workers_rest_between_windows_and_work_in_them(self, make_stepper: Callable[..., Stepper]) -> None:
        stepper = make_stepper(num_workers=1)
        for _ in range(2):
            window(stepper)
            (worker,) = stepper.iterator._workers  # type: ignore[attr-defined]
            process = psutil.Process(worker.pid)
            while process.status() != psutil.STATUS_STOPPED:  # a signal arrives when it does
                os.sched_yield()


class TestRestart:
    def make_loader(self, **loading: Any) -> Callable[[Any], Any]:
        plan = make_plan(neutral_choices(data_loading=loading))
        return lambda batches: build_loader(Recorded(), Numbered(), plan.loader, batch_sampler=batches)

    def test_starting_workers_costs_something(self) -> None:
        fresh = epoch_restart_ns(self.make_loader(num_workers=2), BATCHES[:2], 0.0)
        assert fresh > 0

    def test_is_never_negative(self) -> None:
        """Where the ordinary wait is longer than the restart, starting costs nothing."""
        assert epoch_restart_ns(self.make_loader(), BATCHES[:2], 1e12) == 0
