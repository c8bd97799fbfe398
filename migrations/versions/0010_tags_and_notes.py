"""Add tags and notes of studies

Revision ID: 0010
Revises: 0009
Created: 2026-11-26
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("studies", sa.Column("tags", sa.Text(), server_default="", nullable=False))
    op.add_column("studies", sa.Column("notes", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("studies", "notes")
    op.drop_column("studies", "tags")
