"""Rows of data frames."""

from __future__ import annotations

from typing import Any

import pandas as pd


def rows_of(info: pd.DataFrame) -> list[Any]:
    """Its rows by the names of its columns; what they hold, each `get_*_info()` says."""
    return list(info.itertuples())
