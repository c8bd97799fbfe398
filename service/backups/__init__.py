"""Copies of a database and its artifacts in one file, made while the service runs, and put back.

`copying.py` says what is done in which order, `archive.py` how the file looks; `sqlite.py` and `postgresql.py` copy
one database each, with the means of that database.
"""

from steptune.service.backups.copying import BackupReport, RestoreReport, back_up, restore

__all__ = ["BackupReport", "RestoreReport", "back_up", "restore"]
