"""Fixtures of the contracts."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from steptune.service.connections import create_engine_for


@pytest.fixture
def engine(database_url) -> Iterator[Engine]:
    engine = create_engine_for(database_url)
    yield engine
    engine.dispose()
