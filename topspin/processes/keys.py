"""The keys by which an engine's processes know each other on wires that others can reach.

Owns the key files, their permissions, and reading them again when they change. A directory has

    GROUP.secret   the X25519 secret key of a group that this process belongs to
    GROUP.public   the public keys accepted from GROUP, the one that it uses itself first

each key as 64 hexadecimal digits on a line of its own. A group is a role ("gateway", "scheduler",
"attention", ...) or the `key` of a node spec. Knows no socket: channels (CURVE) and m2n_comm
(the handshake of a pair) use them; `topspin keys` writes them (app.cli.keys).
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from topspin.errors import ConfigError

KEY_BYTES: Final = 32
SECRET: Final = ".secret"
PUBLIC: Final = ".public"
GROUP_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
# A directory of keys is small; anything larger was not written by us.
MAX_FILES: Final = 256
MAX_FILE_BYTES: Final = 8192

_log = logging.getLogger("keys")


@dataclass(frozen=True)
class Keys:
    """The keys of a process of `group`; `accepted` gives the group of each public key."""

    group: str
    secret: bytes = field(repr=False)
    accepted: Mapping[bytes, str]

    def public_of(self, group: str) -> bytes:
        """Return the public key that `group` uses. Raises ConfigError if there is none."""
        for public, owner in self.accepted.items():  # in the order of their file
            if owner == group:
                return public
        raise ConfigError(f"there is no public key of {group!r}: its file {group}{PUBLIC}")


class KeyDirectory:
    """A directory of keys, as one process of `group` uses it."""

    def __init__(self, path: Path, group: str) -> None:
        """Read it. Raises ConfigError naming a file that is missing, malformed or too open."""
        self._path, self._group = path, group
        self._seen = self._stamps()
        self._keys = read_keys(path, group)

    def read(self) -> Keys:
        """Return the keys as they are now; those of before while a file cannot be used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return self._keys
        # Once for each change, also if it fails: strangers' handshakes come here too.
        self._seen = stamps
        try:
            self._keys = read_keys(self._path, self._group)
            _log.info("keys: read again")
        except (ConfigError, OSError) as error:
            _log.warning("keys: not read again: %s", error)
        return self._keys

    def _stamps(self) -> list[tuple[str, int, int]] | None:
        """Return what changes when a file does, or its mode; None: a file cannot be found.

        Follows links: Kubernetes swaps a whole folder.
        """
        try:
            found = [(path.name, path.stat()) for path in _files(self._path)]
        except (ConfigError, OSError):
            return None
        return [(name, status.st_ctime_ns, status.st_ino) for name, status in found]


def read_keys(path: Path, group: str) -> Keys:
    """Return the keys in directory `path` for a process of `group`. Raises ConfigError."""
    check_group(group)
    accepted: dict[bytes, str] = {}
    secret = None
    for file in _files(path):
        owner = file.name.removesuffix(file.suffix)
        _check_mode(file)
        if file.suffix == SECRET:
            if owner == group:
                (secret,) = read_file(file, count=1)
            continue
        check_group(owner)
        for public in read_file(file):
            other = accepted.setdefault(public, owner)
            if other != owner:
                raise ConfigError(f"{file}: a key of {other} too")
    if secret is None:
        raise ConfigError(f"{path}: there is no {group}{SECRET}; `topspin keys` makes it")
    return Keys(group, secret, accepted)


def check_group(group: str) -> None:
    """Raise ConfigError unless `group` can name a group of keys: names become file names."""
    if not GROUP_NAME.fullmatch(group):
        raise ConfigError(
            f"key group {group!r}: use up to 32 of a-z, 0-9, - and _, a letter or digit first"
        )


def _files(path: Path) -> list[Path]:
    try:
        found = sorted(each for each in path.iterdir() if each.suffix in (SECRET, PUBLIC))
    except OSError as error:
        raise ConfigError(f"key directory {path}: {error.strerror}") from error
    if len(found) > MAX_FILES:
        raise ConfigError(f"key directory {path}: {len(found)} files, at most {MAX_FILES} are read")
    return found


def _check_mode(file: Path) -> None:
    """Raise ConfigError if others than owner and group could read a secret or change a key."""
    mode = stat.S_IMODE(file.stat().st_mode)
    forbidden = stat.S_IRWXO if file.suffix == SECRET else stat.S_IWOTH
    if mode & forbidden:
        raise ConfigError(f"{file}: its mode is {mode:04o}, which lets all users in; use 0440")


def read_file(file: Path, *, count: int | None = None) -> list[bytes]:
    """Return the keys in `file`, of which there must be `count` if given. Raises ConfigError."""
    try:
        with open(file, "rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError
        found = [bytes.fromhex(line) for line in text.decode("ascii").split()]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError:
        found = []
    if (
        not found
        or any(len(each) != KEY_BYTES for each in found)
        or count not in (None, len(found))
    ):
        wanted = "one key" if count == 1 else "keys"
        # Without its content: it may be a secret.
        raise ConfigError(f"{file}: not {wanted} of {2 * KEY_BYTES} hexadecimal digits a line")
    return found


def new_secret() -> bytes:
    """Return a new X25519 secret key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of_secret(secret: bytes) -> bytes:
    """Return the public key that belongs to `secret`."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def write_file(file: Path, keys: list[bytes], *, mode: int) -> None:
    """Replace `file` at once by `keys`, with `mode` from the beginning. Raises ConfigError."""
    beside = file.with_name(f".{file.name}.new")
    try:
        beside.unlink(missing_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "w", encoding="ascii") as stream:
            stream.writelines(f"{key.hex()}\n" for key in keys)
            stream.flush()
            os.fsync(stream.fileno())
        beside.chmod(mode)  # the umask took some away
        beside.replace(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
