"""Store URLs: `chdb://FOLDER[?database=NAME]` (embedded) and `http(s)://user:pw@host:port/NAME` (served)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from ingest.errors import UsageError

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed store URL; `path` is set for an embedded store, `host` for a served one. `shown` has no password."""

    shown: str
    database: str
    path: str | None = None
    host: str = ""
    port: int = 8123
    user: str = "default"
    password: str = ""
    secure: bool = False


def parse_url(url: str) -> Address:
    """Address of a store URL. Raises `UsageError` that names the two forms."""
    parts = urlsplit(url)
    if parts.scheme == "chdb":
        path = unquote(parts.netloc + parts.path)
        database = parse_qs(parts.query).get("database", ["kvtide"])[0]
        if path and _IDENTIFIER.fullmatch(database):
            return Address(url, database, path=path)
    elif parts.scheme in ("http", "https") and parts.hostname:
        secure = parts.scheme == "https"
        database = unquote(parts.path.strip("/")) or "kvtide"
        user = unquote(parts.username or "default")
        port = parts.port or (8443 if secure else 8123)
        shown = f"{parts.scheme}://{user}@{parts.hostname}:{port}/{database}"
        if _IDENTIFIER.fullmatch(database):
            return Address(shown, database, None, parts.hostname, port, user, unquote(parts.password or ""), secure)
    raise UsageError(f"store URL {_without_password(url)!r} is neither chdb://FOLDER[?database=NAME] nor http(s)://user:pw@host:port/NAME")


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)
