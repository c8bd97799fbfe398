"""Every query of the interface uses an index, and no list is sorted after it was read."""

import pytest
from api_builders import fill, served, sqlite_url
from sqlalchemy import event

LISTED = ["", "?state=completed", "?owner={owner}", "?hardware=00", "?workload_id=0", "?workload=zoo:synthetic"]
PATHS = [
    *(f"/studies{query}" for query in LISTED),
    "/studies/{study}",
    *(
        f"/studies/{{study}}/{part}"
        for part in ("trials", "findings", "decisions", "recommendation", "artifacts", "events")
    ),
    "/trials/{trial}",
    *(f"/trials/{{trial}}/{part}" for part in ("windows", "breakdown", "kernels", "gaps", "collectives", "findings")),
    *(f"/trials/{{trial}}/{part}" for part in ("guard", "artifacts", "logs")),
    "/workloads",
    "/events",
]
SORTED_BY_DESIGN = ("breakdowns", "studies.owner_id, events.kind")
"""A few rows of one trial, the longest category first; events of all studies of one user, which have no order of their
own."""


@pytest.mark.parametrize("user", ["ada", "root"])
def test_reading_uses_indexes(tmp_path, user: str) -> None:
    with served(sqlite_url(tmp_path), tmp_path) as service:
        study_id, trial_ids = fill(service)
        service.token("root", "admin")
        names = {"study": study_id, "trial": trial_ids[0], "owner": service.user_id("ada")}
        statements: list[tuple[str, tuple]] = []
        engine = service.services.engine

        @event.listens_for(engine, "before_cursor_execute")
        def remember(connection, cursor, statement, parameters, context, many) -> None:
            if statement.startswith("SELECT"):
                statements.append((statement, parameters))

        for path in PATHS:
            assert service("GET", path.format(**names), user=user).status_code == 200, path
        event.remove(engine, "before_cursor_execute", remember)
        with engine.connect() as connection:
            for statement, parameters in statements:
                plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
                unsound = [step for step in plan if step.startswith("SCAN") and "INDEX" not in step]
                if not any(name in statement for name in SORTED_BY_DESIGN):
                    unsound += [step for step in plan if "TEMP B-TREE FOR ORDER BY" in step]
                assert unsound == [], f"{statement}\n{plan}"
