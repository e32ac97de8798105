"""`--deadline` and `--max-error-rate` as people write them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import pytest

from batchllm.data.error_count import ErrorCount
from batchllm.errors import JobError
from batchllm.nightly.deadline import parse_deadline
from batchllm.nightly.error_rate import parse_error_rate


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time with a change of the clocks."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def local(*parts: int) -> datetime.datetime:
    return datetime.datetime(*parts).astimezone()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("06:00", (2026, 11, 29, 2, 30), (2026, 11, 29, 6, 0)),
        ("06:00", (2026, 11, 29, 22, 0), (2026, 11, 30, 6, 0)),
        ("6:00", (2026, 11, 29, 6, 0), (2026, 11, 30, 6, 0)),
        ("23:59:30", (2026, 12, 31, 23, 59), (2026, 12, 31, 23, 59, 30)),
        ("2026-12-01T06:00", (2026, 11, 29, 22, 0), (2026, 12, 1, 6, 0)),
        ("2026-12-01 06:00", (2026, 11, 29, 22, 0), (2026, 12, 1, 6, 0)),
    ],
)
def test_a_time_is_its_next_occurrence_and_a_moment_is_itself(
    berlin: None, text: str, now: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert parse_deadline(text, now=local(*now)) == local(*expected)


def test_an_offset_is_heeded_and_a_change_of_the_clocks_in_the_night_is_counted(berlin: None) -> None:
    now = local(2026, 10, 24, 22, 0)
    assert parse_deadline("2026-10-25T05:00Z", now=now) == datetime.datetime(2026, 10, 25, 5, tzinfo=datetime.UTC)
    # The night of 2026-10-25 has 25 hours here.
    assert parse_deadline("06:00", now=now) - now == datetime.timedelta(hours=9)


@pytest.mark.parametrize("text", ["", "6", "25:00", "06:60", "tomorrow", "2026-11-29T01:00", "0001-01-01T00:00"])
def test_other_texts_and_moments_that_have_passed_are_refused(berlin: None, text: str) -> None:
    with pytest.raises(JobError, match="--deadline"):
        parse_deadline(text, now=local(2026, 11, 29, 2, 0))


def test_error_rates_are_shares_with_or_without_a_percent_sign() -> None:
    assert [parse_error_rate(text) for text in ("5%", "0.05", "0", "100 %", "1")] == [0.05, 0.05, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("num_rows", [100, 1000])
def test_as_many_errors_as_are_allowed_are_not_too_many_and_one_more_is(num_rows: int) -> None:
    for failed in range(num_rows):
        rate = parse_error_rate(f"{failed * 100 // num_rows}.{failed * 1000 // num_rows % 10}%")
        count = ErrorCount(rate=rate, num_rows=num_rows, num_failed=failed)
        assert not count.is_too_high, failed
        count.add(failed)
        assert count.is_too_high, failed


def test_a_moment_behind_the_end_of_the_calendar_is_refused(berlin: None) -> None:
    with pytest.raises(JobError, match="--deadline 9999"):
        parse_deadline("9999-12-31T23:59:59-23:00", now=local(2026, 11, 29, 2, 0))


@pytest.mark.parametrize("text", ["", "%", "5", "-1%", "nan", "101%", "many"])
def test_other_error_rates_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="--max-error-rate"):
        parse_error_rate(text)
