"""Judging whether a candidate is the same training: pure functions over what a rank recorded."""
