"""Contrast of colours as browsers state them."""

from __future__ import annotations

import re


def luminance(fill: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", fill)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: str, behind: str) -> float:
    light, dark = sorted((luminance(text), luminance(behind)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
