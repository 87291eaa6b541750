"""Access to the API: keys, the tenants that they belong to, and addresses that need keys.

Owns the reading of keys (the variable TOPSPIN_API_KEY, and a file that is read again when it
changes) and the check of every request, as ASGI middleware around the whole application, so that no
route can be forgotten. Knows no route but /health and /live. Called by server.gateway.service.

What a tenant caches and stores is not shared with another: see Exchange.salted and the handler.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from server.gateway.errors import error_response
from server.gateway.http.exchange import exchange_of
from topspin.errors import ConfigError
from topspin.messages import Tenant
from topspin.plan.network import is_loopback
from topspin.plan.settings import API_KEY_VARIABLE, GatewaySection
from topspin.processes.listening import bind

DEFAULT_TENANT: Final = "default"
# Probes have no key; the answer tells the engine's state only.
OPEN_PATHS: Final = frozenset({"/health", "/live", "/ping"})
# What makes OPTIONS a preflight; without one of them it would reach the routes.
_PREFLIGHT_HEADERS: Final = frozenset({b"origin", b"access-control-request-method"})
MIN_KEY_CHARS: Final = 16
MAX_TENANT_CHARS: Final = 64
# Each request is compared with all of them, in 0.15 ms.
MAX_KEYS: Final = 1024
MAX_FILE_BYTES: Final = 2**20
MAX_CREDENTIAL_BYTES: Final = 4096

_log = logging.getLogger("gateway")


class ApiKeys:
    """The keys that are valid now, and their tenants."""

    def __init__(self, key: str | None, file: Path | None) -> None:
        """`key` is the default tenant's. Raises ConfigError for keys that cannot be used."""
        own = Tenant(name=DEFAULT_TENANT)
        self._own = {} if not key else {_digest(_checked(key, API_KEY_VARIABLE)): own}
        self._file = file
        self._seen: tuple[int, int] | None = None
        self._read: Mapping[bytes, Tenant] = {}
        if file is not None:
            self._seen, self._read = _stamp(file), read_key_file(file)

    def __bool__(self) -> bool:
        return bool(self._own) or self._file is not None

    def tenant_of(self, key: bytes) -> Tenant | None:
        """Return the tenant of `key`, or None; takes as long for any key."""
        self._read_again()
        digest, found = hashlib.sha256(key).digest(), None
        for known, tenant in (*self._own.items(), *self._read.items()):
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def _read_again(self) -> None:
        if self._file is None:
            return
        try:
            stamp = _stamp(self._file)
        except ConfigError:
            stamp = None
        if stamp == self._seen:
            return
        # Once for each change, also if it fails: requests with a wrong key come here too, and must
        # not make the gateway read a file or write a line each.
        self._seen = stamp
        try:
            self._read = read_key_file(self._file)
            _log.info("gateway: API keys read again")
        except ConfigError as error:
            _log.warning("gateway: API keys not read again: %s", error)


def read_key_file(file: Path) -> dict[bytes, Tenant]:
    """Return the digests of the keys in `file`, with their tenants.

    A line is "TENANT: KEY", a tenant may have several; behind one of them may stand what the tenant
    is granted: weight=2 max_concurrency=8, and so on by the names of Tenant's fields. Lines that
    are empty or begin with # are skipped. Raises ConfigError naming the line, never its content.
    """
    try:
        if stat.S_IMODE(file.stat().st_mode) & stat.S_IRWXO:
            raise ConfigError(f"--api-key-file {file}: its mode lets all users in; use 0440")
        with open(file, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file {file}: more than {MAX_FILE_BYTES} bytes")
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {file}: it is not UTF-8") from None
    found: dict[bytes, str] = {}
    tenants: dict[str, Tenant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--api-key-file {file}, line {number}"
        tenant, separator, rest = (each.strip() for each in line.partition(":"))
        if not (tenant and separator):
            raise ConfigError(f"{where}: it is not TENANT: KEY")
        key, *grants = rest.split() or [""]
        if len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable():
            raise ConfigError(
                f"{where}: a tenant's name has at most {MAX_TENANT_CHARS} printable characters"
            )
        digest = _digest(_checked(key, where))
        if found.setdefault(digest, tenant) != tenant:
            raise ConfigError(f"{where}: another tenant has the same key")
        if len(found) > MAX_KEYS:
            raise ConfigError(f"{where}: at most {MAX_KEYS} keys are served")
        granted = _granted(tenant, grants, where)
        if grants and tenants.setdefault(tenant, granted) != granted:
            raise ConfigError(f"{where}: another line grants the same tenant something else")
    if not found:
        raise ConfigError(f"--api-key-file {file}: it has no keys")
    return {digest: tenants.get(name, Tenant(name=name)) for digest, name in found.items()}


def _granted(tenant: str, grants: Sequence[str], where: str) -> Tenant:
    """Return the tenant with what stands behind its key."""
    names = [each.name for each in msgspec.structs.fields(Tenant) if each.name != "name"]
    matches = [re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)", each, re.ASCII) for each in grants]
    given = {match[1]: match[2] for match in matches if match is not None}
    if len(given) < len(grants) or not given.keys() <= set(names):
        raise ConfigError(
            f"{where}: a key has no blanks; behind it may stand {'=, '.join(names)}= with numbers"
        )
    try:
        return msgspec.convert({**given, "name": tenant}, Tenant, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def _checked(key: str, where: str) -> str:
    if len(key) < MIN_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{where}: a key has at least {MIN_KEY_CHARS} printable ASCII characters, no blanks"
        )
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
    return status.st_ctime_ns, status.st_ino  # changes with the mode too


def keys_of(section: GatewaySection) -> ApiKeys:
    """Return the keys of the HTTP side. Raises ConfigError if others can reach it without one."""
    file = None if section.api_key_file is None else Path(section.api_key_file)
    keys = ApiKeys(os.environ.get(API_KEY_VARIABLE), file)
    if not keys and not is_loopback(section.host):
        # A host that is not this one needs no keys, but another name.
        bind(msgspec.structs.replace(section, port=0)).close()
        raise ConfigError(
            f"--host {section.host}: other hosts can reach it, so it needs keys: set the variable "
            f"{API_KEY_VARIABLE}, or give --api-key or --api-key-file"
        )
    return keys


class Authentication:
    """ASGI middleware, inside of Exchanges: refuses requests without a valid key.

    With `preflights`, a browser's question what it may send (CORS) is let through, which has no
    key; the application's CORS middleware answers it, and no route does. `open_paths` are others
    that ask for none.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        *,
        preflights: bool = False,
        open_paths: Set[str] = frozenset(),
    ) -> None:
        self._app = app
        self._keys = keys
        self._preflights = preflights
        self._open_paths = OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        app = self._app
        if scope["type"] == "http" and not self._is_open(scope):
            credential = _credential(scope["headers"])
            tenant = None if credential is None else self._keys.tenant_of(credential)
            if tenant is None:
                app = _refusal(scope["path"])
            else:
                exchange_of(scope).tenant = tenant
        await app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        if scope["path"] in self._open_paths:
            return True
        names = {name for name, _ in scope["headers"]}
        return self._preflights and scope["method"] == "OPTIONS" and names >= _PREFLIGHT_HEADERS


def _credential(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key that a request brings: OpenAI's way, or Anthropic's; None: not exactly one."""
    given = [
        (name, value.strip()) for name, value in headers if name in (b"authorization", b"x-api-key")
    ]
    if len(given) != 1 or len(given[0][1]) > MAX_CREDENTIAL_BYTES:
        return None
    [(name, value)] = given
    if name == b"x-api-key":
        return value or None
    scheme, _, key = value.partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def _refusal(path: str) -> ASGIApp:
    error = HTTPException(
        401,
        "a valid API key is needed: `Authorization: Bearer KEY`, or `x-api-key: KEY`",
        headers={"WWW-Authenticate": "Bearer"},
    )
    return error_response(error, path)
