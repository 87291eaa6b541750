"""CURVE for the control plane: which addresses need keys, who is let in, keys that change.

Owns the security settings of ZeroMQ sockets and the listening ends' sockets of each key. Knows no
message. The keys are topspin.processes.keys'; called by topspin.processes.channel only.

A key that has been replaced must not end the connections made with it. libzmq ends all of an
address when that is unbound, and listens with one key per bind. So each key of the listening end
gets a listener of its own on the same address (SO_REUSEPORT), and the kernel is told to give all
new connections to the newest.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import zmq
from zmq.utils import z85

from topspin.errors import ConfigError
from topspin.plan.network import is_loopback, place_of
from topspin.process import allow_open_files
from topspin.processes.listening import bound_socket, in_url

if TYPE_CHECKING:
    from topspin.processes.keys import KeyDirectory, Keys

NAME: Final = "control address"
"""Of addresses in messages."""

MAX_FILES: Final = 65536
"""Strangers' connections are open until they fail to prove a key in time; nobody else comes in
where they fill the process's limit of open files."""
_BACKLOG: Final = 128
_SO_ATTACH_REUSEPORT_CBPF: Final = 51
_RETURN_CONSTANT: Final = 0x06
# Strangers must not fill the log.
_LOG_INTERVAL_S: Final = 1.0

_log = logging.getLogger("keys")


def check_protected(address: str, keys: KeyDirectory | None) -> None:
    """Raise ConfigError for a control address that other hosts can reach, unless there are keys.

    And for one of tcp that is none.
    """
    if not address.startswith("tcp:"):
        return
    host, _ = place_of(address, name=NAME)
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"control address {address}: other hosts can reach it, so it needs keys: make some "
            "with `topspin keys`, and give every process its folder with --keys"
        )


def secure_client(socket_: zmq.Socket[Any], keys: Keys, server: str) -> None:
    """Have `socket_` prove its key, and connect to a process of the group `server` only."""
    from topspin.processes.keys import public_of_secret

    socket_.curve_secretkey = keys.secret
    socket_.curve_publickey = public_of_secret(keys.secret)
    socket_.curve_serverkey = keys.public_of(server)


class Gatekeeper:
    """Lets groups of a key directory in at one address, while keys come and go."""

    def __init__(
        self,
        context: zmq.Context[Any],
        socket_: zmq.Socket[Any],
        address: str,
        keys: KeyDirectory,
        groups: Collection[str] | None = None,
    ) -> None:
        """Listen, for `groups` only (None: all). Raises ConfigError for an address that is none,
        or is taken."""
        # Only now: few processes listen, and it loads asyncio.
        from zmq.auth.thread import ThreadAuthenticator

        self._socket, self._address, self._directory = socket_, address, keys
        self._groups = groups
        self._secret = b""
        self._num_listeners = 0
        self._place = place_of(address, name=NAME)
        self._refusal_logged_s = 0.0
        allow_open_files(MAX_FILES)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self)
        socket_.curve_server = True
        try:
            self.renew()
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        """Listen with the secret key that the directory has now."""
        secret = self._directory.read().secret
        if secret == self._secret:
            return
        self._socket.curve_secretkey = secret
        listener = self._listener()
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(f"tcp://{in_url(self._place[0])}:{self._place[1]}")
        self._secret = secret
        self._num_listeners += 1

    def _listener(self) -> socket.socket:
        """Return a socket that from now on gets all new connections of the address."""
        try:
            if self._num_listeners == 0:
                # Another process must not have it; ours shares it with itself.
                bound_socket(*self._place).close()
            listener = bound_socket(*self._place, shares_port=True)
            try:
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                _steer(listener, self._num_listeners)
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            raise ConfigError(f"control address {self._address}: {error.strerror}") from error
        self._place = (self._place[0], listener.getsockname()[1])
        return listener

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether the peer that has proved to own `key` is let in (zmq.auth calls this)."""
        group = self._directory.read().accepted.get(z85.decode(key))
        is_known = group is not None and (self._groups is None or group in self._groups)
        now_s = time.monotonic()
        if not is_known and now_s >= self._refusal_logged_s + _LOG_INTERVAL_S:
            self._refusal_logged_s = now_s
            _log.warning("control: refused a peer whose key is not accepted")
        return is_known

    def group_of(self, frame: zmq.Frame) -> str:
        """Return the group whose key the sender of `frame` has; "" if it is accepted no more."""
        public = z85.decode(str(frame.get("User-Id")))
        return self._directory.read().accepted.get(public, "")

    def close(self) -> None:
        """Stop deciding; before the context ends."""
        self._authenticator.stop()


def _steer(listener: socket.socket, idx: int) -> None:
    """Have the kernel give connections of the address to its listener `idx`, counted from 0."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN_CONSTANT, 0, 0, idx))
    pointer = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, pointer)
