"""Rows of data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def rows_of(info: pd.DataFrame) -> list[Any]:
    """Return the rows of a table as named tuples with a field for each column; the table's `get_*_info()` describes the
    fields.
    """
    return list(info.itertuples())
