"""How a checker talks: it reads what is to be checked from standard input and prints what the library made of it.

Checkers run in the environments of `make export-environments`, one process for all files of an environment.
"""

import json
import os
import sys
import traceback
from contextlib import contextmanager


def serve(checks) -> None:
    """Prints, for each {"check": NAME, "path": FILE} in a JSON list, {"found": {...}} or {"problem": "..."}.

    Args:
        checks: By name: a function of the path that gives plain values, and raises where the library refuses.
    """
    answers = []
    for task in json.load(sys.stdin):
        with own_environment():
            try:
                answers.append({"found": checks[task["check"]](task["path"])})
            except Exception as error:
                where = traceback.format_exc().splitlines()[-3:]
                answers.append({"problem": f"{type(error).__name__}: {error}", "where": where})
    sys.stdout.write("\n===\n" + json.dumps(answers, default=str))


@contextmanager
def own_environment():
    """Puts the variables back that a check sets."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def refuse_unknown(names, known, where: str) -> None:
    """Refuse here what a library ignores silently."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise KeyError(f"{where} has no {', '.join(unknown)}")
