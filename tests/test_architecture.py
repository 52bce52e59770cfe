"""The design's arrows: who may import whom, and the one importer of each heavy client."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("analytics", "bench", "ingest", "kvtide", "sql", "streams")
ALLOWED = {
    "analytics": set(),
    "ingest": {"sql"},
    "sql": set(),
    "streams": {"analytics", "ingest"},
    "kvtide": set(PACKAGES),
    "bench": set(PACKAGES),
}
ONE_IMPORTER = {
    "confluent_kafka": "ingest/kafka.py",
    "clickhouse_connect": "ingest/store.py",
    "faust": "streams/app.py",
    "mode": "streams/app.py",
}


def imports(path: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in sorted((ROOT / package).rglob("*.py"))
        if (bad := imports(path) & set(PACKAGES) - ALLOWED[package] - {package})
    }
    assert not wrong


@pytest.mark.parametrize("client", ONE_IMPORTER)
def test_heavy_clients_have_one_importer(client: str) -> None:
    found = {str(path.relative_to(ROOT)) for path in modules() if client in imports(path)}
    assert found == {ONE_IMPORTER[client]}


def test_sql_lives_in_sql() -> None:
    """No module but the store builds statements: the words that open one stand in no other string."""
    opening = ("select ", "insert into", "create table", "alter table", "create view")
    for path in modules():
        if str(path.relative_to(ROOT)) == "ingest/store.py":
            continue
        tree = ast.parse(path.read_text())
        docs = {id(n.body[0].value) for n in ast.walk(tree) if hasattr(n, "body") and isinstance(n.body, list) and n.body
                and isinstance(n.body[0], ast.Expr)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert not node.value.lstrip().lower().startswith(opening), f"{path}:{node.lineno}"
