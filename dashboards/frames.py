"""Rows of data frames."""

from __future__ import annotations

from typing import Any

import pandas as pd


def rows_of(info: pd.DataFrame) -> list[Any]:
    """Rows of the table by the names of its columns, as its `get_*_info()` describes them."""
    return list(info.itertuples())
