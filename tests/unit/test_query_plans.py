"""Every query of the interface uses an index, and no list is sorted after it was read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from api_builders import Served, fill, served
from sqlalchemy import Connection, Engine, event

LISTED = ["", "?state=completed", "?owner={owner}", "?hardware=00", "?workload_id=0", "?workload=zoo:synthetic"]
PATHS = [
    *(f"/studies{query}" for query in LISTED),
    "/studies/{study}",
    *(
        f"/studies/{{study}}/{part}"
        for part in ("trials", "findings", "decisions", "recommendation", "artifacts", "events")
    ),
    "/studies/{study}/trials?state=completed",
    "/studies/{study}/trials?state=completed&format=csv",
    "/studies/{study}/trials?format=csv",
    "/studies/{study}/optuna",
    "/trials/{trial}",
    *(f"/trials/{{trial}}/{part}" for part in ("windows", "breakdown", "kernels", "gaps", "collectives", "findings")),
    *(f"/trials/{{trial}}/{part}" for part in ("guard", "artifacts", "logs")),
    "/workloads",
    "/events",
]
SORTED_BY_DESIGN = "breakdowns"
"""A few rows of one trial, the longest category first."""

Plan = Callable[[Connection, str, object], list[str]]


def sqlite_plan(connection: Connection, statement: str, parameters) -> list[str]:
    return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]


def postgresql_plan(connection: Connection, statement: str, parameters) -> list[str]:
    """Plan as for large tables, which an index serves: what is here would be faster to read and to sort."""
    for way in ("seqscan", "bitmapscan", "sort"):
        connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")
    return [row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)]


def unsound(step: str) -> bool:
    """True where a step reads a whole table."""
    found = step in ("SCAN packed", "SCAN CONSTANT ROW")  # rows that were read before, or none
    read_whole = step.startswith("SCAN") and "INDEX" not in step and not found
    return read_whole or "Seq Scan" in step


def sorts(step: str) -> bool:
    """An incremental sort orders the few rows of one trial among themselves."""
    return "TEMP B-TREE FOR ORDER BY" in step or ("Sort  (" in step and "Incremental" not in step)


@contextmanager
def remembered(engine: Engine) -> Iterator[list[tuple[str, object]]]:
    """The reading statements of a context."""
    statements: list[tuple[str, object]] = []

    def remember(connection, cursor, statement, parameters, context, many) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", remember)
    yield statements
    event.remove(engine, "before_cursor_execute", remember)


def plans(service: Served, user: str, plan: Plan) -> Iterator[tuple[str, list[str]]]:
    study_id, trial_ids = fill(service)
    service.token("root", "admin")
    names = {"study": study_id, "trial": trial_ids[0], "owner": service.user_id("ada")}
    engine = service.services.engine
    with remembered(engine) as statements:
        for path in PATHS:
            assert service("GET", path.format(**names), user=user).status_code == 200, path
    for statement, parameters in dict(statements).items():
        with engine.connect() as connection:
            yield statement, plan(connection, statement, parameters)


@pytest.mark.parametrize("user", ["ada", "root"])
def test_reading_uses_indexes(database_url: str, tmp_path, user: str) -> None:
    plan = sqlite_plan if database_url.startswith("sqlite") else postgresql_plan
    with served(database_url, tmp_path) as service:
        for statement, steps in plans(service, user, plan):
            assert [step for step in steps if unsound(step)] == [], f"{statement}\n{steps}"
            if SORTED_BY_DESIGN not in statement:
                assert [step for step in steps if sorts(step)] == [], f"{statement}\n" + "\n".join(steps)
