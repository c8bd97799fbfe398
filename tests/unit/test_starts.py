"""Time that a compilation takes again where its code is in the cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.search.starts import warm_compile_s

seconds = st.floats(min_value=0, max_value=3600)


@given(seconds, seconds)
def test_it_is_never_longer_and_grows_with_what_it_took(one: float, other: float) -> None:
    assert 0 <= warm_compile_s(one) <= one
    assert (one <= other) <= (warm_compile_s(one) <= warm_compile_s(other))


@pytest.mark.parametrize(
    ("cold_s", "warm_s"), [(7.2, 2.7), (35.6, 6.2), (50.3, 6.4), (56.6, 9.5), (90.2, 4.7), (133, 7.9)]
)
def test_it_is_what_studies_on_a_gpu_saw(cold_s: float, warm_s: float) -> None:
    assert warm_s / 1.7 < warm_compile_s(cold_s) < 1.7 * warm_s
