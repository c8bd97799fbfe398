"""Judgement of whether a candidate is still the same training: pure functions over the records of a rank."""
