"""Verdict on whether a candidate's training is the same as the reference's: pure functions of one rank's records."""
