"""Figures over intervals."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.intervals import interval_max, interval_min, interval_sum


@settings(max_examples=200, deadline=None)
@given(data=st.data(), values=st.lists(st.integers(-9, 9), min_size=1, max_size=70))
def test_sum_greatest_and_smallest_equal_those_of_slices(data: st.DataObject, values: list[int]) -> None:
    bounds = st.tuples(st.integers(0, len(values) - 1), st.integers(1, len(values))).filter(lambda b: b[0] < b[1])
    intervals = data.draw(st.lists(bounds, max_size=20))
    first, last = (np.array([b[side] for b in intervals], dtype=np.int64) for side in (0, 1))
    array = np.array(values)
    assert interval_max(array, first=first, last=last).tolist() == [max(values[a:b]) for a, b in intervals]
    assert interval_min(array, first=first, last=last).tolist() == [min(values[a:b]) for a, b in intervals]
    assert interval_sum(array, first=first, last=last).tolist() == [sum(values[a:b]) for a, b in intervals]
