"""Opens the data plane between processes: the only door to shm, tcp and nixl.

An expert node listens before it says Hello to the scheduler (the address travels in it)
and accepts once it knows the attention nodes; an attention node connects to all expert
nodes. Knows no scheduler. In one process use local.LocalHub instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Collection, Sequence
from typing import Literal

from m2n_comm.addresses import (
    NIXL,
    TCP,
    UNIX,
    check_loopback,
    connect,
    is_loopback,
    is_on_this_host,
    same_user,
)
from m2n_comm.attention_side import AttentionSide
from m2n_comm.emulate import LinkEmulation
from m2n_comm.expert_side import ExpertSide
from m2n_comm.flags import check_platform
from m2n_comm.handshake import Meeting, PairHello, Reception, ask, make_hello, send_message
from m2n_comm.lines import Check, Lines, wait_on
from m2n_comm.net import NetShape, WaitPolicy
from m2n_comm.nixl_agent import load_nixl
from m2n_comm.nixl_open import NixlOpening
from m2n_comm.shm import (
    PairHandles,
    ShmLines,
    ShmPair,
    create_handles,
    map_handles,
)
from m2n_comm.tcp import TcpLines, TcpPair, tune_socket
from m2n_comm.windows import PairLayout
from topspin import __version__
from topspin.errors import ConfigError, PeerLost
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer

_BACKLOG = 128

Between = Literal["shm", "tcp", "nixl"]


class ExpertListener:
    """The address at which one expert node waits for its attention nodes.

    Invariant: `address` is reachable from construction until close(), or until accept() has
    met all of them if it is not to be used again.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._is_nixl = address.startswith(NIXL)
        self.address = address

    def accept(
        self,
        shape: NetShape,
        *,
        index: int,
        incarnation: int,
        attention_incarnations: tuple[int | None, ...],
        timeout_s: float,
        table: ExpertTable | None = None,
        wait: WaitPolicy = "block",
        revision: str = __version__,
        generation: int = 1,
        check: Check = wait_on,
        reuse: bool = False,
    ) -> ExpertSide:
        """Wait for all attention nodes (None: an absent one) and return the expert side.

        With `table` (and later ones by set_table) slots beyond this node's are refused.
        Stops listening once all are there, unless the address is to be used again (`reuse`)
        for the pairs of a later `generation`. `check` is called during long waits, in steps
        too, and may end them. Raises DeadlineExceeded naming who is missing,
        VersionMismatch or FrameError naming the field in which a peer differs.
        """
        expected = tuple(
            None
            if theirs is None
            else make_hello(
                shape,
                attention=attention,
                expert=index,
                attention_incarnation=theirs,
                expert_incarnation=incarnation,
                revision=revision,
                generation=generation,
            )
            for attention, theirs in enumerate(attention_incarnations)
        )
        deadline_s = time.monotonic() + timeout_s
        reception = Reception(
            self._sock,
            expected=expected,
            trusted=same_user if self._is_unix else _anyone,
            deadline_s=deadline_s,
            check=check,
        )
        layout = PairLayout(shape)
        num_peers = len(attention_incarnations)
        lines: Lines
        if self._is_nixl:
            lines, met = self._accept_nixl(
                reception, layout, index, wait=wait, check=check, deadline_s=deadline_s
            )
        elif self._is_unix:
            lines, met = _accept_shm(reception, layout, num_peers, wait=wait, check=check)
        else:
            met = reception.run(send_message)
            pairs = _tcp_pairs(met, num_peers)
            lines = TcpLines(layout=layout, role="expert", pairs=pairs, wait=wait, check=check)
        with contextlib.ExitStack() as undo:
            undo.callback(lines.close)
            net = ExpertSide(
                shape=shape,
                index=index,
                incarnation=incarnation,
                attention_incarnations=attention_incarnations,
                lines=lines,
                links=tuple(met[i].hello.link if i in met else None for i in range(num_peers)),
                table=table,
            )
            undo.pop_all()
        if not reuse:
            self.close()
        return net

    def _accept_nixl(
        self,
        reception: Reception,
        layout: PairLayout,
        index: int,
        *,
        wait: WaitPolicy,
        check: Check,
        deadline_s: float,
    ) -> tuple[Lines, dict[int, Meeting]]:
        """Form one pair after the other; an attention node that leaves meanwhile may return."""
        opening = NixlOpening(
            layout,
            role="expert",
            index=index,
            one_host=self._is_unix or is_loopback(self._sock.getsockname()[0]),
            wait=wait,
            check=check,
            deadline_s=deadline_s,
        )

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

    def close(self) -> None:
        """Stop listening; safe to call twice. Nets that were returned live on."""
        self._sock.close()


def listen_expert(
    transport: Between, *, host: str | None = None, remote: bool = False
) -> ExpertListener:
    """Open the address of an expert node: "unix:@NAME" for shm, "tcp:HOST:PORT" for tcp.

    For nixl the address, "nixl:" and one of both, is that of the handshake: tcp if `host` is
    given. `remote`: `host` may be any IPv4 address, on a network that nobody else uses.
    Raises ConfigError for another transport, an unsupported machine, a missing
    package, or a host that is not loopback: frames are neither authenticated nor encrypted.
    """
    prefix = ""
    if transport == "nixl":
        load_nixl()
        prefix = NIXL
    if transport == "shm" or (transport == "nixl" and host is None):
        if transport == "shm":
            check_platform()
        name = f"topspin-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where: str | tuple[str, int] = f"\0{name}"
    elif transport in ("tcp", "nixl"):
        host = host or "127.0.0.1"
        if not remote:
            check_loopback(host)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        where = (host, 0)
    else:
        raise ConfigError(f"--transport {transport}: between processes use shm, tcp or nixl")
    try:
        tune_socket(sock)
        sock.bind(where)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--transport {transport}: cannot listen: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    if sock.family == socket.AF_UNIX:
        return ExpertListener(sock, f"{prefix}{UNIX}@{name}")
    return ExpertListener(sock, f"{prefix}{TCP}{host}:{sock.getsockname()[1]}")


def connect_attention(
    shape: NetShape,
    *,
    index: int,
    incarnation: int,
    experts: Sequence[ExpertPeer | None],
    table: ExpertTable,
    timeout_s: float,
    link: LinkEmulation | None = None,
    wait: WaitPolicy = "block",
    checksum: bool | None = None,
    revision: str = __version__,
    generation: int = 1,
    check: Check = wait_on,
    remote: bool = False,
) -> AttentionSide:
    """Connect to every expert node (None: an absent one) and return the side of all pairs.

    `link` is emulated in both directions. `checksum`: whether tcp payloads carry one; None:
    those that leave this host do (on loopback there is no wire, and it costs a quarter).
    `check` is called during long waits, now and in steps, and may end them. `remote`: expert
    nodes may be on other hosts, see listen_expert.
    Raises DeadlineExceeded or PeerLost naming the expert node, StaleFrame if it is not the
    life that `experts` names, VersionMismatch or FrameError naming the field that differs.
    """
    deadline_s = time.monotonic() + timeout_s
    hellos = {
        expert: make_hello(
            shape,
            attention=index,
            expert=expert,
            attention_incarnation=incarnation,
            expert_incarnation=peer.incarnation,
            revision=revision,
            generation=generation,
            link=link,
            checksum=not is_on_this_host(peer.address) if checksum is None else checksum,
        )
        for expert, peer in enumerate(experts)
        if peer is not None
    }
    addresses = {expert: peer.address for expert, peer in enumerate(experts) if peer is not None}
    layout = PairLayout(shape)
    with contextlib.ExitStack() as undo:
        lines: Lines
        if _all_nixl(addresses.values()):
            opening = NixlOpening(
                layout,
                role="attention",
                index=index,
                one_host=all(is_on_this_host(address) for address in addresses.values()),
                wait=wait,
                check=check,
                deadline_s=deadline_s,
            )
            undo.callback(opening.close)
            hellos = {expert: opening.offer(expert, hello) for expert, hello in hellos.items()}
            _meet(
                hellos,
                addresses,
                undo=undo,
                deadline_s=deadline_s,
                check=check,
                opening=opening,
                remote=remote,
            )
            lines = opening.lines()
        else:
            meetings = _meet(
                hellos, addresses, undo=undo, deadline_s=deadline_s, check=check, remote=remote
            )
            lines = _attention_lines(layout, meetings, len(experts), wait=wait, check=check)
        undo.pop_all()
        undo.callback(lines.close)
        net = AttentionSide(
            shape=shape,
            index=index,
            incarnation=incarnation,
            expert_incarnations=tuple(
                None if peer is None else peer.incarnation for peer in experts
            ),
            table=table,
            lines=lines,
            link=link,
        )
        undo.pop_all()
    return net


def _meet(
    hellos: dict[int, PairHello],
    addresses: dict[int, str],
    *,
    undo: contextlib.ExitStack,
    deadline_s: float,
    check: Check,
    opening: NixlOpening | None = None,
    remote: bool = False,
) -> dict[int, Meeting]:
    """Greet every expert node, then hear them all; `undo` closes what was opened.

    With nixl each pair is formed before the next node is heard, in the order in which every
    attention node does it, so that no two wait for each other.
    """
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
        meetings[expert] = ask(socks[expert], hello, deadline_s=deadline_s, check=check)
        undo.callback(_close_fds, meetings[expert].fds)
        if opening is not None:
            opening.form(expert, socks[expert], meetings[expert].hello.memory)
    return meetings


def _attention_lines(
    layout: PairLayout,
    meetings: dict[int, Meeting],
    num_peers: int,
    *,
    wait: WaitPolicy,
    check: Check,
) -> Lines:
    """Build the lines of one attention node; all its expert nodes use one transport."""
    families = {meeting.sock.family for meeting in meetings.values()}
    if families == {socket.AF_INET}:
        holes = _tcp_pairs(meetings, num_peers)
        return TcpLines(layout=layout, role="attention", pairs=holes, wait=wait, check=check)
    if families != {socket.AF_UNIX}:
        raise ConfigError("expert nodes of one engine must all use shm or all use tcp")
    check_platform()
    pairs: list[ShmPair | None] = [None] * num_peers
    for expert, meeting in meetings.items():
        if len(meeting.fds) != len(PairHandles._fields):
            raise PeerLost(f"expert {meeting.hello.expert}: the handshake brought no memory")
        handles = PairHandles(*meeting.fds)
        windows = map_handles(layout, handles.memory)
        meeting.sock.setblocking(False)
        bells = (handles.attention_bell, handles.expert_bell)
        pairs[expert] = ShmPair(windows, *bells, meeting.sock)
    lines = ShmLines(layout=layout, role="attention", pairs=tuple(pairs), wait=wait, check=check)
    for meeting in meetings.values():
        os.close(PairHandles(*meeting.fds).memory)
    return lines


def _welcome_shm(
    sock: socket.socket, hello: PairHello, layout: PairLayout, handles: dict[int, PairHandles]
) -> None:
    """Make the memory of one pair and send it with the answer."""
    pair = create_handles(layout)
    handles[hello.attention] = pair
    try:
        send_message(sock, hello, tuple(pair))
    except OSError:
        _close_fds(tuple(handles.pop(hello.attention)))
        raise


def _accept_shm(
    reception: Reception,
    layout: PairLayout,
    num_peers: int,
    *,
    wait: WaitPolicy,
    check: Check,
) -> tuple[Lines, dict[int, Meeting]]:
    """Meet all attention nodes, each with memory of its own, and map it here too."""
    handles: dict[int, PairHandles] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(_close_handles, handles)
        meetings = reception.run(lambda sock, hello: _welcome_shm(sock, hello, layout, handles))
        for meeting in meetings.values():
            undo.callback(meeting.sock.close)
            meeting.sock.setblocking(False)
        pairs: list[ShmPair | None] = [None] * num_peers
        for attention, meeting in meetings.items():
            pair = handles[attention]
            windows = map_handles(layout, pair.memory)
            pairs[attention] = ShmPair(windows, pair.expert_bell, pair.attention_bell, meeting.sock)
        lines = ShmLines(layout=layout, role="expert", pairs=tuple(pairs), wait=wait, check=check)
        undo.pop_all()
    for pair in handles.values():
        os.close(pair.memory)
    return lines, meetings


def _all_nixl(addresses: Collection[str]) -> bool:
    """Return whether all, not none, of the expert nodes use nixl. Raises ConfigError."""
    nixl = [address.startswith(NIXL) for address in addresses]
    if any(nixl) and not all(nixl):
        raise ConfigError("expert nodes of one engine must all use nixl, or none")
    return any(nixl)


def _tcp_pairs(meetings: dict[int, Meeting], num_peers: int) -> tuple[TcpPair | None, ...]:
    pairs: list[TcpPair | None] = [None] * num_peers
    for peer, meeting in meetings.items():
        pairs[peer] = TcpPair(meeting.sock, meeting.hello.checksum)
    return tuple(pairs)


def _anyone(_: socket.socket) -> bool:
    """Trust a loopback tcp connection until it has said its incarnations."""
    return True


def _close_handles(handles: dict[int, PairHandles]) -> None:
    for pair in handles.values():
        _close_fds(tuple(pair))


def _close_fds(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
