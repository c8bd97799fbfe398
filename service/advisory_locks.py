"""Advisory locks on PostgreSQL: one number for each purpose, which no other application of the same server may use."""

from __future__ import annotations

MIGRATION = 0x5745_9713
"""Lock of the process that changes the schema."""
CLAIMS = 0x5745_9714
"""Lock of claims, which take milliseconds: one at a time, so that quotas are kept and no slot is claimed twice."""
FIRST_START = 0x5745_9715
"""Lock of the process that makes the first administrator."""
COLLECTION = 0x5745_9716
"""Lock that processes hold to put artifacts (shared) or to collect garbage (exclusive)."""
EVENT_NUMBERS = 0x5745_9717
"""First of two lock numbers, held shared by transactions that have drawn or will draw an event's number. The second is
the number above which theirs lies.
"""
