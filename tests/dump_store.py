"""Every stored row of a kvtide database as sorted JSON lines by table, to compare two runs to the last digit.

`python -m tests.dump_store URL` prints it, for a store that another process has just closed (an embedded engine opens one folder).
"""

from __future__ import annotations

import json
import sys

from ingest.store import Store

# Written by the clock, or the worker's own: they differ between two runs that agree on every result.
_APART = {"schema_migrations", "shard_state"}
_CLOCK_COLUMNS = {"inserted_at", "at"}


def dump(store: Store) -> dict[str, list[str]]:
    """Table name to its rows as JSON text, sorted; duplicates stay."""
    found = store.rows("SELECT name FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree' ORDER BY name")
    tables = {}
    for name in (row["name"] for row in found if row["name"] not in _APART):
        rows = [{key: item for key, item in row.items() if key not in _CLOCK_COLUMNS} for row in store.rows(f"SELECT * FROM {name}")]
        tables[name] = sorted(json.dumps(row, default=repr, sort_keys=True) for row in rows)
    return tables


if __name__ == "__main__":
    with Store.open(sys.argv[1]) as opened:
        json.dump(dump(opened), sys.stdout)
