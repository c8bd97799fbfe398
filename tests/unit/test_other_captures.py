"""Captures of other profilers give the analysis that one of torch.profiler gives, or say what is missing."""

import gzip
import json
import sqlite3
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import other_captures
import pytest

from steptune.tuner.profiling import decoded_size
from steptune.tuner.profiling.analysis import analyse_rank, analyse_traces
from steptune.tuner.profiling.captures import archive, whole_files
from steptune.tuner.profiling.captures.step_names import StepRange, chosen_steps
from steptune.tuner.profiling.perfetto import write_perfetto
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import TraceError
from steptune.tuner.profiling.trace_files import find_traces

WRITERS = [
    other_captures.nsight,
    other_captures.jax,
    other_captures.rocprof_json,
    other_captures.rocprof_csv,
]
Writer = Callable[[Path], Path]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_the_breakdown_is_that_of_torch_profiler(write: Writer, tmp_path: Path) -> None:
    expected = analyse_rank(other_captures.kineto(tmp_path)).breakdowns[0]
    analysis = analyse_rank(write(tmp_path))
    (breakdown,) = analysis.breakdowns
    assert breakdown.num_steps == other_captures.NUM_STEPS
    assert breakdown.categories == expected.categories
    assert breakdown.steps == expected.steps
    assert {kernel.name for kernel in analysis.kernels} >= {other_captures.GEMM, other_captures.ADD}


def changed(path: Path, old: str, new: str) -> Path:
    """A text file with other words."""
    path.write_text(path.read_text().replace(old, new))
    return path


def unmarked_tables(folder: Path) -> Path:
    path = other_captures.rocprof_csv(folder)
    changed(folder / "321_marker_api_trace.csv", "train_step", "layer")
    return path


def altered(path: Path, statement: str) -> Path:
    """An export in which a statement was executed."""
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA writable_schema = ON")
        base.execute(statement)
    return path


def profile_with(folder: Path, row: object) -> Path:
    path = other_captures.jax(folder)
    profile = json.loads(gzip.decompress(path.read_bytes()))
    profile["traceEvents"].append(row)
    path.write_bytes(gzip.compress(json.dumps(profile).encode()))
    return path


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: altered(other_captures.nsight(folder), "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'late'"),
        lambda folder: altered(other_captures.nsight(folder), "UPDATE StringIds SET value = x'ff'"),
        lambda folder: altered(
            other_captures.nsight(folder), "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = ~(1 << 63)"
        ),
        lambda folder: altered(
            other_captures.nsight(folder), "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 1 << 60"
        ),
        lambda folder: profile_with(folder, {"ph": "M", "name": "thread_name", "pid": [1], "tid": 2}),
        lambda folder: profile_with(folder, {"ph": "X", "name": "op", "pid": 1, "tid": 13, "ts": 1e308}),
        lambda folder: changed(other_captures.rocprof_json(folder), '"buffer_records": {', '"records": {'),
        lambda folder: changed(other_captures.rocprof_csv(folder), "Correlation_Id", "Correlation"),
        lambda folder: cut_row(folder),
    ],
)
def test_values_that_a_format_does_not_have_are_refused(write: Writer, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"does not have the format of a.* \(\w+Error"):
        read_trace(write(tmp_path))


def cut_row(folder: Path) -> Path:
    path = other_captures.rocprof_csv(folder)
    copies = folder / "321_memory_copy_trace.csv"
    copies.write_text(copies.read_text() + '"MEMORY_COPY"\n')
    return path


def test_one_long_text_in_every_row_is_refused(tmp_path: Path) -> None:
    text = f"ALTER TABLE NVTX_EVENTS ADD COLUMN more TEXT DEFAULT '{'x' * (2 << 20)}'"
    with pytest.raises(TraceError, match="SQLite file cannot be read"):
        read_trace(altered(other_captures.nsight(tmp_path), text))


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_files, "MOST_BYTES", 1 << 20)
    path = tmp_path / "results.json.gz"
    path.write_bytes(gzip.compress(b'{"rocprofiler-sdk-tool": [' + b"[]," * (1 << 20)))
    with pytest.raises(TraceError, match="more than 1 MiB: record a shorter trace"):
        read_trace(path)


def test_a_file_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_size, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(whole_files, "MOST_DECODED_BYTES", 1 << 26)
    path = tmp_path / "results.json.gz"
    path.write_bytes(gzip.compress(b'{"rocprofiler-sdk-tool": [' + b"[]," * (1 << 20) + b"[]]}"))
    with pytest.raises(TraceError, match="decoding its 3 MiB would take about 144 MiB of memory"):
        read_trace(path)


def test_operations_that_jax_derives_from_streams_are_not_counted_twice(tmp_path: Path) -> None:
    """The line "XLA Ops" of a GPU sums up its streams; that of a TPU has its operations."""
    expected = analyse_rank(other_captures.jax(tmp_path)).breakdowns[0]
    path = profile_with(tmp_path, {"ph": "M", "pid": 1, "tid": 92, "name": "thread_name", "args": {"name": "XLA Ops"}})
    profile = json.loads(gzip.decompress(path.read_bytes()))
    rows = profile["traceEvents"]
    rows += [{**row, "tid": 92, "name": "fusion.1"} for row in rows if row.get("tid") == 13 and row["ph"] == "X"]
    path.write_bytes(gzip.compress(json.dumps(profile).encode()))
    analysis = analyse_rank(path)
    assert analysis.breakdowns[0].categories == expected.categories
    assert "fusion.1" not in {kernel.name for kernel in analysis.kernels}


def test_the_breakdown_has_what_the_training_does(tmp_path: Path) -> None:
    """So that all captures agree on something."""
    (breakdown,) = analyse_rank(other_captures.kineto(tmp_path)).breakdowns
    assert breakdown.categories["compute_matmul"] == other_captures.NUM_STEPS * 200_000
    assert breakdown.categories["communication"] == other_captures.NUM_STEPS * 80_000
    assert breakdown.categories["copy_host_to_device"] == other_captures.NUM_STEPS * 20_000


def test_devices_and_the_wall_clock_of_an_export(tmp_path: Path) -> None:
    trace = read_trace(other_captures.nsight(tmp_path))
    (device,) = trace.devices
    assert (device.name, device.num_sms, device.compute_capability) == ("NVIDIA H100", 132, (9, 0))
    assert trace.origin_ns + trace.base_time_ns == 1_700_000_001_000_000_000
    copies = [name for name in trace.names if name.startswith("Memcpy")]
    assert copies == ["Memcpy HtoD (Pageable -> Device)"]


@pytest.mark.parametrize(
    ("write", "remedy"),
    [
        (lambda folder: other_captures.nsight(folder, step="layer {}"), "torch.cuda.nvtx.range"),
        (lambda folder: other_captures.jax(folder, marks=""), "StepTraceAnnotation"),
        (lambda folder: changed(other_captures.rocprof_json(folder), "train_step", "layer"), "is ROCTx on AMD"),
        (lambda folder: unmarked_tables(folder), "is ROCTx on AMD"),
    ],
)
def test_a_capture_without_steps_says_how_to_mark_them(write: Writer, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"16 operations on devices.*no steps are marked") as raised:
        read_trace(write(tmp_path))
    assert remedy in str(raised.value)
    assert "not have the format" not in str(raised.value)


def test_steps_of_a_device_serve_where_the_host_has_none(tmp_path: Path) -> None:
    (breakdown,) = analyse_rank(other_captures.jax(tmp_path, marks="device")).breakdowns
    assert breakdown.num_steps == other_captures.NUM_STEPS


def test_an_export_of_several_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"2 processes use devices.*separate report"):
        read_trace(other_captures.nsight(tmp_path, processes=(321, 322)))


def test_a_name_decides_what_is_a_step() -> None:
    def chosen(*names: str) -> int:
        """Each range lasts as long as its place says, and comes twice."""
        found = [
            one
            for length, name in enumerate(names, 1)
            for begin in (0, 100)
            for one in StepRange.of(name, begin, begin + length, (1, 1), None)
        ]
        return chosen_steps(found)[0].end_ns if found else 0

    assert chosen("train_step 3") == chosen("iteration") == chosen("Iter#12") == chosen("ProfilerStep#7") == 1
    assert chosen("optimizer.step", "forward_step", "data batch", "validation step", "stepwise", "epoch 3") == 0
    assert chosen("inner step", "outer iteration", "optimizer step") == 2


def test_steps_are_those_of_one_thread() -> None:
    ranges = [*StepRange.of("step", 0, 10, (1, 1), None), *StepRange.of("step", 5, 30, (1, 2), None)]
    assert [one.thread for one in chosen_steps(ranges)] == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("report.nsys-rep", b"\x00\x01", "report of Nsight Systems.*nsys export --type sqlite"),
        ("kernels.ncu-rep", b"\x00", "Nsight Compute"),
        ("steps.pftrace", b"\x0a\x00", "Perfetto's own format.*--output-format json"),
        ("host.xplane.pb", b"\x0a", "pass the .trace.json.gz"),
        ("memory.pickle", b"\x80\x04", "Steptune does not open pickles"),
        ("results.csv", b"a,b\n", "_kernel_trace.csv"),
        ("report.sqlite", b"SQLite format 3\x00" + b"\xff" * 200, "SQLite file cannot be read"),
        (
            "other.json",
            b'{"traceEvents": [{"ph": "X", "cat": "blink", "name": "paint", "ts": 1, "dur": 2}]}',
            "1 event of 'blink'",
        ),
    ],
)
def test_what_is_no_trace_of_steps_says_what_it_is_and_what_to_do(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


@pytest.mark.parametrize(
    ("table", "says"), [("rocpd_kernel_dispatch_1", "rocpd convert"), ("users", "required tables")]
)
def test_other_databases_are_refused(table: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as base:
        base.execute(f"CREATE TABLE {table} (id INT)")
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_tracks_of_another_capture_are_written_without_it(tmp_path: Path) -> None:
    target = tmp_path / "tracks.json"
    write_perfetto([other_captures.nsight(tmp_path)], target)
    assert target.read_text().startswith('{"displayTimeUnit"')


def test_a_folder_of_jax_is_its_latest_run(tmp_path: Path) -> None:
    path = other_captures.jax(tmp_path)
    assert find_traces([tmp_path]) == [path]


class TestArchives:
    """A `.zip` of ranks."""

    def packed(self, folder: Path, *members: tuple[str, bytes]) -> Path:
        path = folder / "ranks.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in members:
                packed.writestr(name, content)
        return path

    def test_ranks_are_analysed_together(self, tmp_path: Path) -> None:
        trace = other_captures.kineto(tmp_path).read_bytes()
        members = [
            (f"run/{rank}/trace.json", b'{"distributedInfo": {"rank": %d, "world_size": 2},' % rank + trace[1:])
            for rank in range(2)
        ]
        files = find_traces([self.packed(tmp_path, *members, ("run/readme.txt", b"hello"), ("a.json", b"{}"))])
        assert [rank.rank for rank in analyse_traces(files).ranks] == [0, 1]

    def test_tables_of_one_rank_stay_side_by_side(self, tmp_path: Path) -> None:
        other_captures.rocprof_csv(tmp_path)
        tables = [(f"run/{path.name}", path.read_bytes()) for path in tmp_path.glob("*.csv")]
        (path,) = find_traces([self.packed(tmp_path, *tables)])
        assert analyse_rank(path).breakdowns[0].num_steps == other_captures.NUM_STEPS

    def test_members_stay_in_the_folder(self, tmp_path: Path) -> None:
        trace = other_captures.kineto(tmp_path).read_bytes()
        names = ("../../up.json", "/root.json", "..\\back.json", "C:\\c.json")
        files = find_traces([self.packed(tmp_path, *((name, trace) for name in names))])
        assert sorted(path.name for path in files) == ["back.json", "c.json", "root.json", "up.json"]
        assert len({path.parent.parent for path in files}) == 1
        assert not {"up.json", "back.json"} & {path.name for path in tmp_path.rglob("*")}

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        link = zipfile.ZipInfo("link.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        path = tmp_path / "links.zip"
        with zipfile.ZipFile(path, "w") as packed:
            packed.writestr(link, "/etc/hostname")
        with pytest.raises(TraceError, match="holds no trace"):
            find_traces([path])

    def test_an_archive_that_fills_the_disk_is_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archive, "FREE_BYTES", 1 << 20)
        bomb = self.packed(tmp_path, ("rank0.json", b" " * (8 << 20)))
        with pytest.raises(TraceError, match="unpacks to more than"):
            find_traces([bomb])

    def test_a_damaged_archive_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "ranks.zip"
        path.write_bytes(b"PK\x03\x04 and nothing else")
        with pytest.raises(TraceError, match="cannot be unpacked"):
            find_traces([path])

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_damage_is_refused_however_it_was_packed(self, method: int, tmp_path: Path) -> None:
        path = tmp_path / "ranks.zip"
        with zipfile.ZipFile(path, "w", method) as packed:
            packed.writestr("rank0.json", other_captures.kineto(tmp_path).read_bytes())
        content = path.read_bytes()
        path.write_bytes(content[:80] + bytes(100) + content[180:])
        with pytest.raises(TraceError, match="cannot be unpacked"):
            find_traces([path])

    def test_names_that_no_disk_takes_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="cannot be unpacked"):
            find_traces([self.packed(tmp_path, (f"{'x' * 300}.json", b"{}"))])
        path = self.packed(tmp_path, ("\u00e9.json", b"{}"))
        path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xff"))
        with pytest.raises(TraceError, match="cannot be unpacked"):
            find_traces([path])

    def test_archives_are_found_by_a_pattern_and_in_capitals(self, tmp_path: Path) -> None:
        path = self.packed(tmp_path, ("rank0.json", other_captures.kineto(tmp_path).read_bytes()))
        path = path.rename(tmp_path / "RANKS.ZIP")
        for name in (path, tmp_path / "RANKS*"):
            assert [found.name for found in find_traces([name])] == ["rank0.json"]

    def test_an_archive_is_no_trace_by_itself(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="it is an archive"):
            read_trace(self.packed(tmp_path, ("rank0.json", b"{}")))
