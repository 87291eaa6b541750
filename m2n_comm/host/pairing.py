"""Forms all pairs of one node over its transport, from the two hellos to the lines.

Owns the order in which a node greets its peers, and what each transport exchanges besides:
memory and bells over the Unix socket (shm), nothing (tcp), keys (nixl, by nixl_open.py).
Knows handshakes but no frames; open.py calls it for either role. On an error everything
that was opened is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass

from m2n_comm.addresses import NIXL, connect, is_on_this_host
from m2n_comm.handshake import Meeting, Reception, ask, send_message
from m2n_comm.hello import PairHello
from m2n_comm.host.lines import Check, Lines
from m2n_comm.host.memory_order import check_platform
from m2n_comm.host.shm import PairHandles, ShmLines, ShmPair, create_handles, map_handles
from m2n_comm.host.tcp import TcpLines, TcpPair
from m2n_comm.host.windows import PairLayout
from m2n_comm.net import WaitPolicy
from m2n_comm.nixl.lines import Role
from m2n_comm.nixl.open import NixlOpening
from topspin.errors import ConfigError, PeerLost


@dataclass(frozen=True, slots=True)
class Terms:
    """What a node's lines are made of, whatever carries them. `index` is the node's own."""

    layout: PairLayout
    index: int
    num_peers: int
    wait: WaitPolicy
    check: Check
    deadline_s: float


def accept_tcp(reception: Reception, terms: Terms) -> tuple[Lines, dict[int, Meeting]]:
    """Meet all attention nodes; the connections are the lines."""
    met = reception.run(send_message)
    return _tcp_lines("expert", met, terms), met


def accept_shm(reception: Reception, terms: Terms) -> tuple[Lines, dict[int, Meeting]]:
    """Meet all attention nodes, each with memory of its own, and map it here too."""
    layout = terms.layout
    handles: dict[int, PairHandles] = {}

    def welcome(sock: socket.socket, hello: PairHello) -> None:
        """Make the memory of one pair and send it with the answer."""
        handles[hello.attention] = create_handles(layout)
        try:
            send_message(sock, hello, tuple(handles[hello.attention]))
        except OSError:
            _close_fds(tuple(handles.pop(hello.attention)))
            raise

    with contextlib.ExitStack() as undo:
        undo.callback(_close_handles, handles)
        meetings = reception.run(welcome)
        for meeting in meetings.values():
            undo.callback(meeting.sock.close)
        pairs = {
            attention: ShmPair(
                map_handles(layout, handles[attention].memory),
                handles[attention].expert_bell,
                handles[attention].attention_bell,
                meeting.sock,
            )
            for attention, meeting in meetings.items()
        }
        lines = _shm_lines("expert", pairs, terms)
        undo.pop_all()
    for pair in handles.values():
        os.close(pair.memory)
    return lines, meetings


def accept_nixl(
    reception: Reception, terms: Terms, *, one_host: bool
) -> tuple[Lines, dict[int, Meeting]]:
    """Form one pair after the other; an attention node that leaves meanwhile may return."""
    opening = _nixl_opening("expert", terms, one_host=one_host)

    def welcome(sock: socket.socket, hello: PairHello) -> None:
        send_message(sock, opening.offer(hello.attention, hello))
        try:
            opening.form(hello.attention, sock, hello.memory)
        except PeerLost as error:
            raise ConnectionError(0, str(error)) from error

    with contextlib.ExitStack() as undo:
        undo.callback(opening.close)
        met = reception.run(welcome)
        undo.pop_all()
    return opening.lines(), met


def connect_pairs(
    hellos: dict[int, PairHello], addresses: dict[int, str], terms: Terms, *, remote: bool
) -> Lines:
    """Meet every expert node of `addresses`; all of them use one transport.

    `remote`: they may be on other hosts. Raises ConfigError, and what connect() and ask() do.
    """
    with contextlib.ExitStack() as undo:
        if _all_nixl(addresses.values()):
            one_host = all(is_on_this_host(address) for address in addresses.values())
            opening = _nixl_opening("attention", terms, one_host=one_host)
            undo.callback(opening.close)
            hellos = {expert: opening.offer(expert, hello) for expert, hello in hellos.items()}
            _meet(hellos, addresses, terms, undo=undo, opening=opening, remote=remote)
            lines: Lines = opening.lines()
        else:
            meetings = _meet(hellos, addresses, terms, undo=undo, remote=remote)
            families = {meeting.sock.family for meeting in meetings.values()}
            if families == {socket.AF_INET}:
                lines = _tcp_lines("attention", meetings, terms)
            elif families == {socket.AF_UNIX}:
                lines = _map_shm(meetings, terms)
            else:
                raise ConfigError("expert nodes of one engine must all use shm or all use tcp")
        undo.pop_all()
    return lines


def _meet(
    hellos: dict[int, PairHello],
    addresses: dict[int, str],
    terms: Terms,
    *,
    undo: contextlib.ExitStack,
    remote: bool,
    opening: NixlOpening | None = None,
) -> dict[int, Meeting]:
    """Greet every expert node, then hear them all; `undo` closes what was opened.

    With nixl each pair is formed before the next node is heard, in the order in which every
    attention node does it, so that no two wait for each other.
    """
    deadline_s = terms.deadline_s
    socks = {}
    for expert, hello in hellos.items():
        sock = connect(addresses[expert], expert=expert, deadline_s=deadline_s, remote=remote)
        undo.callback(sock.close)
        socks[expert] = sock
        try:
            send_message(sock, hello)
        except OSError as error:
            raise PeerLost(f"expert {hello.expert}: {error.strerror}") from error
    meetings = {}
    for expert, hello in hellos.items():
        meetings[expert] = ask(socks[expert], hello, deadline_s=deadline_s, check=terms.check)
        undo.callback(_close_fds, meetings[expert].fds)
        if opening is not None:
            opening.form(expert, socks[expert], meetings[expert].hello.memory)
    return meetings


def _map_shm(meetings: dict[int, Meeting], terms: Terms) -> Lines:
    """Map the memory that the expert nodes have sent."""
    check_platform()
    pairs = {}
    for expert, meeting in meetings.items():
        if len(meeting.fds) != len(PairHandles._fields):
            raise PeerLost(f"expert {meeting.hello.expert}: the handshake brought no memory")
        handles = PairHandles(*meeting.fds)
        windows = map_handles(terms.layout, handles.memory)
        pairs[expert] = ShmPair(windows, handles.attention_bell, handles.expert_bell, meeting.sock)
    lines = _shm_lines("attention", pairs, terms)
    for meeting in meetings.values():
        os.close(PairHandles(*meeting.fds).memory)
    return lines


def _shm_lines(role: Role, pairs: dict[int, ShmPair], terms: Terms) -> ShmLines:
    for pair in pairs.values():
        pair.sock.setblocking(False)
    return ShmLines(
        layout=terms.layout,
        role=role,
        pairs=tuple(pairs.get(peer) for peer in range(terms.num_peers)),
        wait=terms.wait,
        check=terms.check,
    )


def _tcp_lines(role: Role, meetings: dict[int, Meeting], terms: Terms) -> TcpLines:
    pairs = {peer: TcpPair(met.sock, met.hello.checksum) for peer, met in meetings.items()}
    return TcpLines(
        layout=terms.layout,
        role=role,
        pairs=tuple(pairs.get(peer) for peer in range(terms.num_peers)),
        wait=terms.wait,
        check=terms.check,
    )


def _nixl_opening(role: Role, terms: Terms, *, one_host: bool) -> NixlOpening:
    return NixlOpening(
        terms.layout,
        role=role,
        index=terms.index,
        one_host=one_host,
        wait=terms.wait,
        check=terms.check,
        deadline_s=terms.deadline_s,
    )


def _all_nixl(addresses: Collection[str]) -> bool:
    """Return whether all, not none, of the expert nodes use nixl. Raises ConfigError."""
    nixl = [address.startswith(NIXL) for address in addresses]
    if any(nixl) and not all(nixl):
        raise ConfigError("expert nodes of one engine must all use nixl, or none")
    return any(nixl)


def _close_handles(handles: dict[int, PairHandles]) -> None:
    for pair in handles.values():
        _close_fds(tuple(pair))


def _close_fds(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
