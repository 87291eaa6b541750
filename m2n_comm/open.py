"""Opens the data plane between processes: the only door to shm, tcp, nixl and cuda_ipc.

An expert node listens before it says Hello to the scheduler (the address travels in it)
and accepts once it knows the attention nodes; an attention node connects to all expert
nodes. Knows no scheduler. In one process use local.LocalHub instead. Over cuda_ipc the nets
are of another kind: an expert node calls accept_device, an attention node connect_ipc of
cuda_ipc_open.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Literal

from kernels.runtime import Runtime
from m2n_comm.addresses import (
    CUDA_IPC,
    NIXL,
    TCP,
    UNIX,
    check_loopback,
    is_loopback,
    is_on_this_host,
    same_user,
)
from m2n_comm.gpu.ipc_expert import IpcExpertNet
from m2n_comm.gpu.ipc_open import accept_ipc
from m2n_comm.handshake import Meeting, Reception
from m2n_comm.hello import PairHello, expected_hellos, make_hello
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.emulate import LinkEmulation
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.lines import Check, Lines, wait_on
from m2n_comm.host.memory_order import check_platform
from m2n_comm.host.pairing import Terms, accept_nixl, accept_shm, accept_tcp, connect_pairs
from m2n_comm.host.tcp import tune_socket
from m2n_comm.host.windows import PairLayout
from m2n_comm.net import NetShape, WaitPolicy
from m2n_comm.nixl.agent import load_nixl
from topspin import __version__
from topspin.errors import ConfigError
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer

_BACKLOG = 128

Between = Literal["shm", "tcp", "nixl", "cuda_ipc"]


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
        assert not self.address.startswith(CUDA_IPC), "accept_device() has its nets"
        expected = expected_hellos(
            shape,
            expert=index,
            incarnation=incarnation,
            attention_incarnations=attention_incarnations,
            revision=revision,
            generation=generation,
        )
        deadline_s = time.monotonic() + timeout_s
        terms = Terms(PairLayout(shape), index, len(expected), wait, check, deadline_s)
        lines, met = self._meet(expected, terms)
        links = [met[peer].hello.link if peer in met else None for peer in range(len(expected))]
        with contextlib.ExitStack() as undo:
            undo.callback(lines.close)
            net = ExpertSide(
                shape=shape,
                index=index,
                incarnation=incarnation,
                attention_incarnations=attention_incarnations,
                lines=lines,
                links=tuple(links),
                table=table,
                wait=wait,
            )
            undo.pop_all()
        if not reuse:
            self.close()
        return net

    def accept_device(
        self,
        shape: NetShape,
        *,
        index: int,
        incarnation: int,
        attention_incarnations: tuple[int | None, ...],
        timeout_s: float,
        table: ExpertTable,
        runtime: Runtime,
        revision: str = __version__,
        generation: int = 1,
        check: Check = wait_on,
        reuse: bool = False,
    ) -> IpcExpertNet:
        """Wait for all attention nodes over cuda_ipc; windows are on the device of `runtime`.

        As accept() else, whose errors it raises; ConfigError too if the memory cannot be had,
        or that of a peer not be mapped.
        """
        assert self.address.startswith(CUDA_IPC), "an address of another transport"
        net = accept_ipc(
            self._sock,
            shape,
            index=index,
            incarnation=incarnation,
            attention_incarnations=attention_incarnations,
            timeout_s=timeout_s,
            table=table,
            runtime=runtime,
            revision=revision,
            generation=generation,
            check=check,
        )
        if not reuse:
            self.close()
        return net

    def _meet(
        self, expected: tuple[PairHello | None, ...], terms: Terms
    ) -> tuple[Lines, dict[int, Meeting]]:
        """Meet all attention nodes in the way of this address's transport."""
        reception = Reception(
            self._sock,
            expected=expected,
            trusted=same_user if self._is_unix else _anyone,
            deadline_s=terms.deadline_s,
            check=terms.check,
        )
        if self._is_nixl:
            one_host = self._is_unix or is_loopback(self._sock.getsockname()[0])
            return accept_nixl(reception, terms, one_host=one_host)
        if self._is_unix:
            return accept_shm(reception, terms)
        return accept_tcp(reception, terms)

    def close(self) -> None:
        """Stop listening; safe to call twice. Nets that were returned live on."""
        self._sock.close()


def listen_expert(
    transport: Between, *, host: str | None = None, remote: bool = False
) -> ExpertListener:
    """Open the address of an expert node: "unix:@NAME" for shm, "tcp:HOST:PORT" for tcp.

    For cuda_ipc it is "cuda_ipc:unix:@NAME". For nixl the address, "nixl:" and one of both, is
    that of the handshake: tcp if `host` is given. `remote`: `host` may be any IPv4 address, on a
    network that nobody else uses. Raises ConfigError for another transport, an unsupported
    machine, a missing package, or a host that is not loopback: frames are neither authenticated
    nor encrypted.
    """
    prefix = ""
    if transport == "nixl":
        load_nixl()
        prefix = NIXL
    if transport == "cuda_ipc":
        prefix = CUDA_IPC
    if transport in ("shm", "cuda_ipc") or (transport == "nixl" and host is None):
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
        raise ConfigError(
            f"--transport {transport}: between processes use shm, tcp, nixl or cuda_ipc"
        )
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
    terms = Terms(PairLayout(shape), index, len(experts), wait, check, deadline_s)
    present = {expert: peer for expert, peer in enumerate(experts) if peer is not None}
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
        for expert, peer in present.items()
    }
    addresses = {expert: peer.address for expert, peer in present.items()}
    lines = connect_pairs(hellos, addresses, terms, remote=remote)
    with contextlib.ExitStack() as undo:
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
            wait=wait,
        )
        undo.pop_all()
    return net


def _anyone(_: socket.socket) -> bool:
    """Trust a loopback tcp connection until it has said its incarnations."""
    return True
