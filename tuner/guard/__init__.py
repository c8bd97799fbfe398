"""Verdict on whether a candidate trains like the reference: pure functions of one rank's records."""
