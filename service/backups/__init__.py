"""Backups of a database and its artifacts in one file, made while the service runs, and their restoration.

`copying.py` has the steps in their order, `archive.py` the format of the file; `sqlite.py` and `postgresql.py` copy
one database each, with the means of that database.
"""

from steptune.service.backups.copying import BackupReport, RestoreReport, back_up, restore

__all__ = ["BackupReport", "RestoreReport", "back_up", "restore"]
