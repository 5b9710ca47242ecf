"""What the database refuses is told without what it was given: keys and secrets are among that."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from rollserve.store.engine import make_engine


def test_a_failed_statement_tells_no_values(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 's.db'}", synchronous="normal", writer=True, connections=1)
    with pytest.raises(sa.exc.DBAPIError) as caught, engine.begin() as conn:
        conn.execute(sa.text("INSERT INTO nowhere VALUES (:secret)"), {"secret": "whsec_told"})
    engine.dispose()
    assert "whsec_told" not in str(caught.value)
