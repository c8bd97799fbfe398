"""Run the revisions on the connection, and in the transaction, that `steptune.service.database.migrate` opened.

Revisions only go forward: to go back, restore the copy made before the upgrade.
"""

from alembic import context

from steptune.service.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,  # SQLite's too, since `steptune.service.connections` begins its transactions itself
    render_as_batch=True,  # SQLite cannot alter most things in place
)
with context.begin_transaction():
    context.run_migrations()
