"""Geometry of windows on a feature map: their size and shift, and the padding of maps that do not divide into whole
windows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Window layout of one attention layer.

    Attributes:
        rows: Height of a window in tokens.
        columns: Width of a window in tokens.
        shift_rows: Rows by which the map is rolled up before it is cut; below `rows`.
        shift_columns: Columns by which it is rolled to the left; below `columns`.
        rolls_before_padding: Whether the map is rolled first and padded afterwards (timm), or padded first
            (torchvision, transformers, published code of detection). It matters where windows do not divide the map.
    """

    rows: int
    columns: int
    shift_rows: int = 0
    shift_columns: int = 0
    rolls_before_padding: bool = False

    def __post_init__(self) -> None:
        for name, size, shift in (
            ("rows", self.rows, self.shift_rows),
            ("columns", self.columns, self.shift_columns),
        ):
            if size < 1:
                raise ValueError(f"the number of {name} in a window must be at least 1, got {size}")
            if not 0 <= shift < size:
                raise ValueError(f"the shift of {name} must be in [0, {size}), got {shift}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens per window, N."""
        return self.rows * self.columns

    @property
    def table_length(self) -> int:
        """Number of relative positions of two tokens of a window: the rows of the bias table."""
        return (2 * self.rows - 1) * (2 * self.columns - 1)

    def padded(self, height: int, width: int) -> tuple[int, int]:
        """Round a map's height and width up to whole windows."""
        return -(-height // self.rows) * self.rows, -(-width // self.columns) * self.columns

    def num_windows(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of windows of a map along its height and its width."""
        padded_height, padded_width = self.padded(height, width)
        return padded_height // self.rows, padded_width // self.columns
