"""Checks for slow communication between GPUs of several hosts: a host's settings, and NCCL's own log.

A host is examined through a directory (`tree.py`): `/`, or a copy of parts of another host's /sys, /proc, /etc and
/dev. Each check is a file in `checks/`. What NCCL did is read from its log (`log.py`) and judged in `log_checks.py`.
None of these runs a command, opens a device or needs a GPU.

Several hosts with a slow network between them can be tried out on one machine: `emulated.py`.
"""
