"""Workers: processes that claim studies from the queue and run them. They never load torch or user code."""
