"""Judgement of whether a candidate is the same training: pure functions over the records of a rank."""
