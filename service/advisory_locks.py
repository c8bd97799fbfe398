"""Advisory locks on PostgreSQL: one number for each purpose. No other application of the same server may use these
numbers.
"""

from __future__ import annotations

MIGRATION = 0x5745_9713
"""Lock of the process that changes the schema."""
CLAIMS = 0x5745_9714
"""Lock that admits one claim at a time, so that quotas are kept and no slot is claimed twice; a claim takes
milliseconds.
"""
FIRST_START = 0x5745_9715
"""Lock of the process that makes the first administrator."""
COLLECTION = 0x5745_9716
"""Lock that processes hold while they store artifacts (shared) or collect garbage (exclusive)."""
EVENT_NUMBERS = 0x5745_9717
"""First key of the shared lock that a transaction takes before it allocates an event's number, and holds until it ends.
The lock's second key is a lower bound of the allocated number.
"""
