"""Durations and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.service.quantities import parse_bandwidth, parse_bytes, parse_duration_s, parse_latency_ns
from steptune.tuner.errors import BudgetError, ChoiceError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h", 3600),
        ("1h30m", 5400),
        ("1h2m3s", 3723),
        ("1.5m", 90),
        ("0.5s", 0.5),
        (" 5M ", 300),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@given(hours=st.integers(0, 99), minutes=st.integers(0, 99), seconds=st.integers(1, 99))
def test_the_parts_of_a_duration_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration_s(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


@pytest.mark.parametrize(
    "text", ["", "five minutes", "5x", "m", "-5m", "5 m", "1h30", "5m!", "1,5m", "nan", "inf", "1e3"]
)
def test_what_is_no_duration_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(BudgetError, match=r"is not a duration: write 90s, 5m or 1h30m") as error:
        parse_duration_s(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["5", "90", "0.5", " 10 "])
def test_a_number_without_a_unit_is_refused_because_minutes_may_be_meant(text: str) -> None:
    with pytest.raises(BudgetError, match=rf"{text!r} has no unit: write {text.strip()}s, {text.strip()}m or"):
        parse_duration_s(text)


@pytest.mark.parametrize("text", ["0s", "0h0m", "0.0m"])
def test_no_time_at_all_is_refused(text: str) -> None:
    with pytest.raises(BudgetError, match=f"'{text}' is not a positive duration"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 1_000_000),
        ("512m", 512 << 20),
        ("8g", 8 << 30),
        ("8GB", 8 << 30),
        ("8GiB", 8 << 30),
        ("1.5k", 1536),
        ("2t", 2 << 40),
        (" 8 g ", 8 << 30),
        ("64b", 64),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "8x", "-8g", "0", "0g", "8gg", "1e9", "g"])
def test_what_is_no_size_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ChoiceError, match="is not a size: write a number of bytes, or 512m, or 8g") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25gbps", 3.125e9),
        ("25Gbit/s", 3.125e9),
        ("400GBps", 4e11),
        ("3.1 GB/s", 3.1e9),
        ("100mbps", 1.25e7),
        ("8bps", 1),
    ],
)
def test_bandwidths_are_of_bits_or_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "25", "25g", "fast", "-1gbps", "0gbps", "25 gigabit", "1e9bps"])
def test_what_is_no_bandwidth_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ChoiceError, match="write bits as 25gbps, or bytes as 400GBps"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "nanoseconds"), [("20us", 20_000), ("20 µs", 20_000), ("0.1ms", 100_000), ("500ns", 500), ("0us", 0)]
)
def test_latencies(text: str, nanoseconds: float) -> None:
    assert parse_latency_ns(text) == pytest.approx(nanoseconds)


@pytest.mark.parametrize("text", ["", "20", "-1us", "1h", "soon"])
def test_what_is_no_latency_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ChoiceError, match="write 20us, or"):
        parse_latency_ns(text)
