"""Support for unmodified training scripts: hooks, which an environment variable arms, observe their runs.

launch.py       starts the command, in a copy-on-write view of its folder (view.py, supervisor.py)
armed/          the folder that PYTHONPATH names: every Python process of the command loads it
agent/          the hooks; needs the standard library and torch only, not this package
record.py       what the agent writes, read back
recognised.py   the record in words
runner.py       trials: starts of the command with changes
enable.py       the same changes in an ordinary run of the script; diff.py writes them into it
verification.py the changed script beside the unchanged one
"""
