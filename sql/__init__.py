"""The project's SQL, read from the files beside this module: numbered migrations and named queries.

A migration is plain SQL in `migrations/NNNN_name.sql`; once it has landed it is never edited, a change is the next number. Every statement
can be run twice (`IF NOT EXISTS`, `OR REPLACE`), so a migration that died half-way is simply run again. Engines are single-server
MergeTree; replication would be a placeholder for the engine clause, filled in by `Migration.statements`.

A query is `queries/name.sql`. Its leading comment says what it answers; a line `-- :name = default  meaning` there documents a parameter
and gives its default (in ClickHouse literal form without quotes); a parameter without such a line, or without `=`, must be passed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_HEADER = re.compile(r"--\s*:(?P<name>\w+)(?:\s*=\s*(?P<default>'[^']*'|\S+))?\s*(?P<text>.*)")
_PLACEHOLDER = re.compile(r"\{\s*(\w+)\s*:\s*([^{}]+?)\s*\}")
# Quoted text and comments are one token each, so that a semicolon inside them does not end a statement.
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`|--[^\n]*|/\*.*?\*/|;|[^'"`;/-]+|.""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step of the schema."""

    number: int
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def statements(self) -> list[str]:
        return split(self.text)


@dataclass(frozen=True, slots=True)
class Query:
    """One named query: `title` is the first line of its header, `types` and `defaults` are by parameter name."""

    name: str
    text: str
    title: str
    types: dict[str, str]
    defaults: dict[str, str]
    meanings: dict[str, str]


def split(text: str) -> list[str]:
    """Statements of an SQL text without their closing semicolons and without comments before them; quotes and comments are respected."""
    statements, current = [], ""
    for token in _TOKEN.findall(text + ";"):
        if token == ";":
            if current.strip():
                statements.append(current.strip())
            current = ""
        elif current.strip() or not token.startswith(("--", "/*")):
            current += token
    return statements


def body(text: str) -> str:
    """The first statement of an SQL text, without the comments before it."""
    return next(iter(split(text)), "")


def label(text: str) -> str:
    """A short name of an SQL text for an error: its first line that is not a comment."""
    first, *more = body(text).splitlines() or [""]
    return f"query {first[:80]!r}" + ("..." if more or len(first) > 80 else "")


def parameters(text: str) -> dict[str, str]:
    """ClickHouse type of every `{name:Type}` placeholder of a query."""
    return dict(_PLACEHOLDER.findall(text))


def migrations() -> list[Migration]:
    """All migrations by number. Raises `ValueError` for a misnamed file or a gap or repeat in the numbers."""
    found = []
    for entry, text in _texts("migrations"):
        match = _FILE.fullmatch(entry)
        if match is None:
            raise ValueError(f"sql/migrations/{entry} is not named NNNN_name.sql")
        found.append(Migration(int(match[1]), match[2], text))
    numbers = [migration.number for migration in found]
    if numbers != list(range(1, len(found) + 1)):
        raise ValueError(f"migration numbers must run from 1 without gap or repeat, found {numbers}")
    return found


def pending(done: Mapping[int, tuple[str, str]]) -> list[Migration]:
    """Migrations that a database has not run, in order; `done` has the name and sha256 of those that it has, by number.

    Raises `ValueError` when one was edited after the database had run it, or when the database has run one that is unknown here.
    """
    known = {migration.number: migration for migration in migrations()}
    for number, (name, sha256) in done.items():
        if number not in known:
            raise ValueError(f"it has run migration {number:04d}_{name}, unknown here; upgrade kvtide")
        if sha256 != known[number].sha256:
            file = f"sql/migrations/{number:04d}_{known[number].name}.sql"
            raise ValueError(f"{file} was edited after it had been run here; restore it and put the change into a new migration")
    return [migration for number, migration in known.items() if number not in done]


def queries() -> dict[str, Query]:
    """All named queries, by name."""
    return {entry.removesuffix(".sql"): _query(entry.removesuffix(".sql"), text) for entry, text in _texts("queries")}


def complete(name: str, params: Mapping[str, object]) -> tuple[Query, dict[str, object]]:
    """A named query with its full parameters, the defaults of its header filled in.

    Raises `ValueError` for an unknown name or parameter, or a missing one; it lists those that there are.
    """
    known = queries()
    if name not in known:
        raise ValueError(f"no query named {name!r}; there are {', '.join(known)}")
    query = known[name]
    full = {**query.defaults, **params}
    missing = [parameter for parameter in query.types if parameter not in full]
    unknown = [parameter for parameter in full if parameter not in query.types]
    if missing or unknown:
        takes = ", ".join(f"{parameter} {kind}" for parameter, kind in query.types.items()) or "none"
        what = f"misses {', '.join(missing)}" if missing else f"does not take {', '.join(unknown)}"
        raise ValueError(f"query {name} {what}; its parameters: {takes}")
    return query, full


def _texts(folder: str) -> Iterator[tuple[str, str]]:
    def name(entry: Traversable) -> str:
        return entry.name

    for entry in sorted(files(__name__).joinpath(folder).iterdir(), key=name):
        if entry.name.endswith(".sql"):
            yield entry.name, entry.read_text(encoding="utf-8")


def _query(name: str, text: str) -> Query:
    header = [line for line in text.splitlines() if line.startswith("--")]
    lines = [match for match in map(_HEADER.fullmatch, header) if match]
    title = header[0].removeprefix("--").strip() if header else ""
    defaults = {m["name"]: m["default"].strip("'") for m in lines if m["default"] is not None}
    return Query(name, text, title, parameters(text), defaults, {m["name"]: m["text"] for m in lines})
