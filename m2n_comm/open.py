"""Opens the data plane between processes: the only entry to shm, tcp, nixl and cuda_ipc.

An expert node listens before it says Hello to the scheduler (the address travels in it) and accepts
once it knows the attention nodes; an attention node connects to all expert nodes. Owns the order of
the handshake, which is the same for all transports: each end offers its memory, takes the peer's,
and proves the line. Knows no scheduler. In one process use host.local.LocalHub or
gpu.local.DeviceNet instead.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from kernels.runtime import Runtime
from m2n_comm.emulate import LinkEmulation
from m2n_comm.gpu.ipc_attention import IpcAttentionNet
from m2n_comm.gpu.ipc_expert import IpcExpertNet
from m2n_comm.gpu.ipc_forming import IpcForming
from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.gpu.staged import StagedExpertNet, StagedNet
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.frames.memory_order import check_platform
from m2n_comm.host.lines import PairLines
from m2n_comm.host.shm import ShmForming
from m2n_comm.host.stage_link import StageLink
from m2n_comm.host.tcp import TcpForming
from m2n_comm.net import AttentionNet, ExpertNet, Senders, wait_policy
from m2n_comm.nixl.agent import load_nixl
from m2n_comm.nixl.forming import NixlForming
from m2n_comm.pairing.addresses import (
    Between,
    connect,
    is_loopback,
    is_on_this_host,
    listen,
    same_user,
    transport_of,
)
from m2n_comm.pairing.handshake import Meeting, ask, introduce, send_message
from m2n_comm.pairing.hello import Identity, PairHello
from m2n_comm.pairing.reception import Reception
from m2n_comm.waits import Waits
from topspin.errors import ConfigError, PeerLost
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer
from topspin.plan.spec import NodeConfig
from topspin.processes.node_life import NodeLife
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork

if TYPE_CHECKING:
    from m2n_comm.pairing.session import Session, Trust

# Peers are there once their checkpoints are loaded, which may take long; the scheduler ends the
# wait if one of them is lost (Inbox.check).
CONNECT_TIMEOUT_S = 3600.0

Formed = TypeVar("Formed", covariant=True)
Node = TypeVar("Node", int, ExpertPeer)


def waits_of(config: NodeConfig, life: NodeLife) -> Waits:
    """Return how a node waits for its peers, while its net forms and afterwards."""
    return Waits(
        timeout_s=CONNECT_TIMEOUT_S,
        policy=wait_policy(config),
        check=life.check,
        resume=life.progress.beat,
    )


class Forming(Protocol[Formed]):
    """The pairs of one node while they are formed, for one transport.

    For each peer, in this order: offer(), take() with its hello, then prove(). close()
    undoes everything unless finish() was called.
    """

    def offer(self, peer: int, hello: PairHello) -> tuple[PairHello, tuple[int, ...]]:
        """Make memory for the pair; return `hello` with its name, and descriptors to send."""

    def take(self, peer: int, met: Meeting) -> None:
        """Take the memory that the peer offers. Raises FrameError, PeerLost."""

    def prove(self, peer: int) -> None:
        """Test the line, once both ends have each other's hello. Raises as take() does."""

    def drop(self, peer: int) -> None:
        """Undo these calls for a peer that was lost meanwhile."""

    def finish(self) -> Formed:
        """Return all pairs, which own memory and sockets from now on."""

    def close(self) -> None:
        """Free everything, after an error."""


class ExpertListener:
    """The address at which one expert node waits for its attention nodes.

    Invariant: `address` is reachable from construction until close(), or, without reuse, until
    accept() has met all of them.
    """

    def __init__(self, sock: socket.socket, address: str, trust: Trust | None = None) -> None:
        self._sock = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._trust = None if self._is_unix else trust
        self.address = address

    def accept(
        self,
        me: Identity,
        attention_incarnations: Sequence[int | None],
        table: ExpertTable,
        waits: Waits,
        *,
        runtime: Runtime | None = None,
        reuse: bool = False,
        senders: Senders = (),
    ) -> ExpertNet:
        """Wait for all attention nodes (None: an absent one) and return the expert side.

        Its batches are on the device of `runtime` (None: the host). Stops listening once all are
        there, unless the address is to be used again (`reuse`) for the pairs of a later generation.
        Raises DeadlineExceeded naming the missing nodes, VersionMismatch or FrameError naming the
        field in which a peer differs, ConfigError if a device's memory cannot be allocated or
        mapped.
        """
        num_attention = len(attention_incarnations)
        with contextlib.ExitStack() as undo:
            met, formed = self._meet(me, _present(attention_incarnations), waits, undo, runtime)
            if isinstance(formed, IpcPairs):
                net: ExpertNet = IpcExpertNet(me, table=table, pairs=formed)
            else:
                net = ExpertSide(
                    me,
                    attention_incarnations=attention_incarnations,
                    lines=formed,
                    links=[
                        met[peer].hello.link if peer in met else None
                        for peer in range(num_attention)
                    ],
                    table=table,
                    wait=waits.policy,
                    senders=senders,
                )
                if runtime is not None:
                    net = StagedExpertNet(net, runtime, shape=me.shape, num_attention=num_attention)
            undo.pop_all()
        if not reuse:
            self.close()
        return net

    def accept_head(
        self, me: Identity, attention: int, incarnation: int, waits: Waits
    ) -> StageLink:
        """Wait for the attention node of a stage and return the stage's end; goes on listening.

        Raises as accept().
        """
        with contextlib.ExitStack() as undo:
            met, lines = self._meet(me, {attention: incarnation}, waits, undo)
            assert not isinstance(lines, IpcPairs), "an engine with stages has no GPUs"
            link = StageLink(
                me,
                peer=attention,
                incarnation=incarnation,
                lines=lines,
                link=met[attention].hello.link,
                wait=waits.policy,
            )
            undo.pop_all()
        return link

    def _meet(
        self,
        me: Identity,
        incarnations: Mapping[int, int],
        waits: Waits,
        undo: contextlib.ExitStack,
        runtime: Runtime | None = None,
    ) -> tuple[Mapping[int, Meeting], PairLines | IpcPairs]:
        """Form the pairs with these attention nodes, which `undo` closes.

        One that disconnects meanwhile may return.
        """
        deadline_s = time.monotonic() + waits.timeout_s
        one_host = self._is_unix or is_loopback(self._sock.getsockname()[0])
        transport = transport_of(self.address)
        forming = _forming(transport, me, waits, deadline_s, runtime, one_host=one_host)
        undo.callback(forming.close)
        reception = Reception(
            self._sock,
            expected={peer: me.hello(peer, each) for peer, each in incarnations.items()},
            # On loopback tcp the incarnations in a hello are the check.
            trusted=same_user if self._is_unix else lambda sock: True,
            deadline_s=deadline_s,
            check=waits.check,
            trust=self._trust,
        )

        def welcome(met: Meeting) -> None:
            peer = met.hello.attention
            try:
                hello = msgspec.structs.replace(met.hello, memory=None, region=None)
                answer, fds = forming.offer(peer, hello)
                forming.take(peer, met)
                send_message(met.sock, answer, fds, session=met.session)
                forming.prove(peer)
            except BaseException as error:
                forming.drop(peer)
                met.sock.close()
                if isinstance(error, PeerLost):
                    raise ConnectionError(0, str(error)) from error
                raise

        met = reception.run(welcome)
        for meeting in met.values():
            undo.callback(meeting.sock.close)
        formed = forming.finish()
        undo.callback(formed.close)
        return met, formed

    def close(self) -> None:
        """Stop listening; safe to call twice. Returned nets stay open."""
        self._sock.close()


def listen_expert(transport: Between, network: NodeNetwork = ON_ONE_HOST) -> ExpertListener:
    """Open the address of an expert node: "unix:@NAME" for shm, "tcp:HOST:PORT" for tcp.

    For cuda_ipc it is "cuda_ipc:unix:@NAME". For nixl the address, "nixl:" before either form, is
    that of the handshake: tcp if `network` has a host.

    With keys, peers over tcp must prove a key of one of the groups in `network.peers` (None: of any
    group that the keys accept), and tcp frames carry authentication codes, though they are not
    encrypted; only then may the host be another address than loopback. nixl also needs
    `trusted_network` for that, as its frames have no codes. Raises ConfigError for such a host,
    another transport, an unsupported machine, a missing package.
    """
    if transport not in ("shm", "tcp", "nixl", "cuda_ipc"):
        raise ConfigError(
            f"--transport {transport}: between processes use shm, tcp, nixl or cuda_ipc"
        )
    if transport == "nixl":
        load_nixl()
    if transport == "shm":
        check_platform()
    return ExpertListener(*listen(transport, network), _trust(network))


def connect_attention(
    me: Identity,
    experts: Sequence[ExpertPeer | None],
    table: ExpertTable,
    waits: Waits,
    *,
    runtime: Runtime | None = None,
    max_rows: int | None = None,
    link: LinkEmulation | None = None,
    network: NodeNetwork = ON_ONE_HOST,
) -> AttentionNet:
    """Connect to every expert node (None: an absent one) and return the side of all pairs.

    Its rows are on the device of `runtime` (None: the host), `max_rows` of them in a step (None: a
    window). `link` is emulated in both directions. `network` is as for listen_expert. Raises
    DeadlineExceeded or PeerLost naming the expert node, UntrustedPeer naming its address,
    StaleFrame if it is not the incarnation in `experts`, VersionMismatch or FrameError naming the
    field that differs, ConfigError if expert nodes use several transports or a device's memory
    cannot be allocated.
    """
    with contextlib.ExitStack() as undo:
        formed = _connect(
            me, _present(experts), waits, undo, runtime=runtime, link=link, network=network
        )
        if isinstance(formed, IpcPairs):
            net: AttentionNet = IpcAttentionNet(
                me, num_experts=len(experts), table=table, pairs=formed
            )
        else:
            net = AttentionSide(
                me,
                expert_incarnations=[each.incarnation if each else None for each in experts],
                table=table,
                lines=formed,
                link=link,
                wait=waits.policy,
            )
            if runtime is not None:
                max_rows = max_rows or me.shape.window_rows
                net = StagedNet(net, runtime, shape=me.shape, max_rows=max_rows)
        undo.pop_all()
    return net


def connect_stage(
    me: Identity,
    stage: int,
    peer: ExpertPeer,
    waits: Waits,
    *,
    link: LinkEmulation | None = None,
    network: NodeNetwork = ON_ONE_HOST,
) -> StageLink:
    """Connect attention node `me` to one of its stages; raises as connect_attention()."""
    with contextlib.ExitStack() as undo:
        lines = _connect(me, {stage: peer}, waits, undo, link=link, network=network)
        assert not isinstance(lines, IpcPairs), "an engine with stages has no GPUs"
        found = StageLink(
            me,
            peer=stage,
            incarnation=peer.incarnation,
            lines=lines,
            link=link,
            wait=waits.policy,
        )
        undo.pop_all()
    return found


def _connect(
    me: Identity,
    peers: Mapping[int, ExpertPeer],
    waits: Waits,
    undo: contextlib.ExitStack,
    *,
    link: LinkEmulation | None,
    network: NodeNetwork,
    runtime: Runtime | None = None,
) -> PairLines | IpcPairs:
    """Form the pairs with these expert nodes, which `undo` closes: send all hellos, then read.

    With keys the first hello is sent when all expert nodes have proved theirs. Each pair is proved
    before the next answer is read, in the same order on every attention node, so that no two wait
    for each other.
    """
    deadline_s = time.monotonic() + waits.timeout_s
    addresses = [peer.address for peer in peers.values()]
    one_host = all(map(is_on_this_host, addresses))
    transport = _one_transport(addresses)
    forming = _forming(transport, me, waits, deadline_s, runtime, one_host=one_host)
    undo.callback(forming.close)
    hellos = {
        expert: me.hello(expert, peer.incarnation, link=link) for expert, peer in peers.items()
    }
    offers = {expert: forming.offer(expert, hello)[0] for expert, hello in hellos.items()}
    socks = {}
    for expert, peer in peers.items():
        sock = socks[expert] = connect(peer.address, network, expert=expert, deadline_s=deadline_s)
        undo.callback(sock.close)
    sessions: Mapping[int, Session] = {}
    trust = _trust(network)
    if trust is not None:
        wired = {expert: sock for expert, sock in socks.items() if sock.family != socket.AF_UNIX}
        sessions = introduce(wired, trust, deadline_s=deadline_s, check=waits.check)
    for expert, offer in offers.items():
        try:
            send_message(socks[expert], offer, session=sessions.get(expert))
        except OSError as error:
            raise PeerLost(f"expert {expert}: {error.strerror}") from error
    for expert, hello in hellos.items():
        met = ask(
            socks[expert],
            hello,
            deadline_s=deadline_s,
            check=waits.check,
            session=sessions.get(expert),
        )
        forming.take(expert, met)
        forming.prove(expert)
    formed = forming.finish()
    undo.callback(formed.close)
    return formed


def _forming(
    transport: Between,
    me: Identity,
    waits: Waits,
    deadline_s: float,
    runtime: Runtime | None,
    *,
    one_host: bool,
) -> Forming[PairLines | IpcPairs]:
    """Return the Forming of a transport. Raises ConfigError for cuda_ipc without a device."""
    if transport == "cuda_ipc":
        if runtime is None:
            raise ConfigError("--transport cuda_ipc: only between nodes on GPUs; use shm")
        return IpcForming(me, waits, runtime)
    if transport == "nixl":
        return NixlForming(me, waits, deadline_s=deadline_s, one_host=one_host)
    if transport == "shm":
        return ShmForming(me, waits)
    return TcpForming(me, waits)


def _present(nodes: Sequence[Node | None]) -> dict[int, Node]:
    """Return the nodes that are there, by index."""
    return {index: each for index, each in enumerate(nodes) if each is not None}


def _trust(network: NodeNetwork) -> Trust | None:
    """Return whom a node with keys trusts; without them their package need not be installed."""
    if network.keys is None:
        return None
    from m2n_comm.pairing.session import Trust

    return Trust(network.keys, network.peers)


def _one_transport(addresses: Collection[str]) -> Between:
    """Return the transport of all expert nodes. Raises ConfigError if they use several."""
    transports = sorted({transport_of(address) for address in addresses})
    if len(transports) != 1:
        found = " and ".join(transports) or "none"
        raise ConfigError(f"expert nodes of one engine must all use one transport, found {found}")
    return transports[0]
