"""Add the revisions of studies to the index by owner and state

Revision ID: 0008
Revises: 0007
Created: 2026-11-24
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

OLD = {
    "ix_studies_owner_id_state_study_id": ["owner_id", "state", "study_id"],
    "ix_studies_owner_id_state_revision": ["owner_id", "state", "revision"],
}
NEW = "ix_studies_owner_id_state_study_id_revision"


def upgrade() -> None:
    """Make one index answer which studies of an owner are in a state, in order, and how often each changed."""
    op.create_index(NEW, "studies", ["owner_id", "state", "study_id", "revision"])
    for name in OLD:
        op.drop_index(name, "studies")


def downgrade() -> None:
    for name, columns in OLD.items():
        op.create_index(name, "studies", columns)
    op.drop_index(NEW, "studies")
