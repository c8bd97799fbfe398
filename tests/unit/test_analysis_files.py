"""Files that trials leave for pages, and what user code may leave in their place."""

import gzip
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from analysed import make_analysis, make_breakdown, make_rank
from msgspec.structs import replace

from steptune.service.api.artifacts import _enclosed, _unpacked_bytes
from steptune.service.studies import FileReplacedError, check_kept
from steptune.service.trial_source import _shown
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.trace_records import Lane, RankWait, Timeline, TraceAnalysis
from steptune.tuner.trials import analysis_files
from steptune.tuner.trials.analysis_files import (
    analysis_text,
    lanes_text,
    read_analysis,
    read_lanes,
    read_timelines,
    timelines_text,
)

MIB = 1 << 20


def timeline(rank: int = 0) -> Timeline:
    return Timeline(
        rank=rank, device="cuda:0", step_boundaries_ns=(0, 9), end_ns=(4, 9), time_ns=({"compute": 4}, {"wait": 5})
    )


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_ranks", [0, 1, 3])
def test_timelines_are_json_and_come_back_one_by_one(num_ranks: int) -> None:
    made = [timeline(rank) for rank in range(num_ranks)]
    text = timelines_text(made)
    assert msgspec.json.decode(text, type=list[Timeline]) == made
    assert list(read_timelines(io.BytesIO(text))) == made


def test_lanes_are_json_and_come_back_one_by_one() -> None:
    made = [lane("device"), lane("thread")]
    text = lanes_text(made)
    assert msgspec.json.decode(text, type=list[Lane]) == made
    assert list(read_lanes(io.BytesIO(text))) == made


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_analysis_is_json_and_its_ranks_come_back_one_by_one(num_ranks: int) -> None:
    made = make_analysis(*(make_rank(make_breakdown([{"compute_matmul": 9}], rank=rank)) for rank in range(num_ranks)))
    text = analysis_text(made)
    assert msgspec.json.decode(text, type=TraceAnalysis) == made
    *ranks, rest = read_analysis(io.BytesIO(text))
    assert replace(rest, ranks=tuple(ranks)) == made


GOOD = timelines_text([timeline(0), timeline(1)])
WRONG = {
    "an array of one line": msgspec.json.encode([timeline(0)]),
    "not JSON": b"[\n{]\n]\n",
    "another record": b'[\n{"rank":0}\n]\n',
    "a comma too few": GOOD.replace(b",\n", b"\n"),
    "a comma too many": GOOD.replace(b"\n]", b",\n]"),
    "no end": GOOD.removesuffix(b"]\n"),
    "more behind it": GOOD + b"[1]",
    "more in its last line": GOOD.replace(b"\n]\n", b"\n]]\n"),
    "nothing": b"",
    "endless nesting": b"[\n" + b"[" * 100_000 + b"\n]\n",
    "one endless line": b"[\n" + b" " * (8 << 20) + b"\n]\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_trial_does_not_write_is_not_kept(tmp_path: Path, name: str) -> None:
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(WRONG[name]))
    for kind in ("timeline", "analysis", "lanes"):
        with pytest.raises(FileReplacedError, match=r"line \d"):
            check_kept(kind, packed)
    check_kept("trace", packed)  # nobody here reads it


def test_a_file_that_is_too_large_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(GOOD))
    check_kept("timeline", packed)
    monkeypatch.setattr(analysis_files, "MAX_TIMELINE_BYTES", len(GOOD) - 1)
    with pytest.raises(FileReplacedError, match="exceeds the limit"):
        check_kept("timeline", packed)


def test_checking_and_sending_take_the_memory_of_a_piece(tmp_path: Path) -> None:
    """A line of four megabytes became a hundred, an array of eighteen took half a gigabyte to be sent."""
    record = msgspec.json.encode(timeline())
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(b"[\n" + b",\n".join([record] * (12 * MIB // len(record))) + b"\n]\n"))
    assert peak_bytes(lambda: check_kept("timeline", packed)) < 4 * MIB

    def send() -> None:
        file = packed.open("rb")
        size = _unpacked_bytes(file)
        assert size is not None
        assert sum(map(len, _enclosed(b"<", file, b">"))) == size + 2

    assert peak_bytes(send) < 4 * MIB


@pytest.mark.parametrize("content", [b"no gzip at all", gzip.compress(b"[" * MIB)[:-20]])
def test_a_damaged_file_is_not_sent(content: bytes) -> None:
    assert _unpacked_bytes(io.BytesIO(content)) is None


def test_a_bomb_is_counted_and_not_unpacked() -> None:
    bomb = gzip.compress(b"0" * (analysis_files.MAX_TIMELINE_BYTES + 1), 1)

    def count() -> None:
        assert _unpacked_bytes(io.BytesIO(bomb)) is None

    assert peak_bytes(count) < 4 * MIB


def lane(kind: str) -> Lane:
    columns = dict.fromkeys(("start_ns", "length_ns", "name", "category", "count", "busy_ns"), (0,))
    return Lane(device="", kind=kind, label=kind, names=("a",), categories=("b",), **columns)


def test_of_ranks_behind_a_page_reads_what_it_shows() -> None:
    lanes = tuple(map(lane, ("device", "stream", "thread")))
    ranks = [make_rank(make_breakdown([{"compute_matmul": 9}], rank=rank), lanes=lanes) for rank in range(2)]
    shown = _shown(io.BytesIO(analysis_text(make_analysis(*ranks))))
    assert shown.ranks == (ranks[0], replace(ranks[1], lanes=lanes[:1]))
    whole = _shown(io.BytesIO(msgspec.json.encode(make_analysis(*ranks))))
    assert whole == make_analysis(*ranks), "as it was kept once"


def test_of_the_rank_in_front_a_page_reads_all_wherever_it_stands() -> None:
    lanes = tuple(map(lane, ("device", "stream")))
    ranks = [make_rank(make_breakdown([{"compute_matmul": 1000}], rank=rank), lanes=lanes) for rank in range(3)]
    waits = tuple(RankWait(rank=n, wait_ns=w, late_share=s) for n, w, s in [(0, 200, 0.0), (1, 0, 1.0), (2, 190, 0.0)])
    shown = _shown(io.BytesIO(analysis_text(make_analysis(*ranks, waits=waits))))
    assert main_rank(shown) == ranks[1]
    assert shown.ranks[2].lanes == lanes[:1]


def test_an_analysis_of_no_rank_is_none() -> None:
    with pytest.raises(ValueError, match="no rank"):
        _shown(io.BytesIO(analysis_text(make_analysis())))
