"""Advisory locks on PostgreSQL: one number for each purpose, which no other application of the same server may use."""

from __future__ import annotations

MIGRATION = 0x5745_9713
"""One process changes the schema."""
CLAIMS = 0x5745_9714
"""Claims go one after the other, so that quotas and slots hold; they take milliseconds."""
FIRST_START = 0x5745_9715
"""One process makes the first administrator."""
COLLECTION = 0x5745_9716
"""Files are put or collected."""
EVENT_NUMBERS = 0x5745_9717
"""The first of two numbers: transactions that have drawn, or are about to draw, an event's number hold it, shared. The
second says above which number theirs is."""
