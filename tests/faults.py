"""Faults on demand in nets that nodes open themselves.

Owns the patch of the two functions by which nodes open their nets. Used in the process of the tests
(threads for nodes) and in tests.system.rig.chaos_node (real nodes). tests.m2n_comm.faults defines
the effect of a fault on a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

from attention_nodes import command
from attention_nodes.stages import command as stage_command
from m2n_comm.open import ExpertListener, connect_attention
from tests.m2n_comm.faults import Fault, FaultInjector


class OnDemand(FaultInjector):
    """Applies `fault` to the next frame, once.

    An exception stands for a bug: sending the frame raises it, and the node ends. A function is
    called by the node's one thread before the frame is sent: it may block for long.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.fault: Fault | Exception | Callable[[], None] | None = None
        self.num_injected = 0

    def crash(self) -> None:
        """Let a bug end the node with its next frame."""
        self.fault = RuntimeError("a crash")

    def next_fault(self) -> Fault | None:
        """Return the requested fault, once."""
        fault, self.fault = self.fault, None
        self.num_injected += fault is not None
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, FunctionType | MethodType):
            fault()
            return None
        return fault


@contextmanager
def faulty_nets(injector_of: Callable[[str, int], OnDemand | None]) -> Iterator[None]:
    """Attach `injector_of(role, index)` to every net that a node opens inside the context.

    The index of a stage is its number as a sender of rows: attention nodes come first.
    """
    connect, accept = connect_attention, ExpertListener.accept

    def faulty_connect(*args: Any, **kwargs: Any) -> Any:
        return _attach(connect(*args, **kwargs), injector_of("attention", args[0].index))

    def faulty_stage(*args: Any, **kwargs: Any) -> Any:
        return _attach(connect(*args, **kwargs), injector_of("stage", args[0].index))

    def faulty_accept(*args: Any, **kwargs: Any) -> Any:
        return _attach(accept(*args, **kwargs), injector_of("expert", args[1].index))

    with (
        mock.patch.object(command, "connect_attention", faulty_connect),
        mock.patch.object(stage_command, "connect_attention", faulty_stage),
        mock.patch.object(ExpertListener, "accept", faulty_accept),
    ):
        yield


@contextmanager
def faulty_node(role: str, index: int) -> Iterator[OnDemand]:
    """Attach an injector, which is yielded, to the net that one node opens inside the context."""
    injector = OnDemand()
    with faulty_nets(lambda *node: injector if node == (role, index) else None):
        yield injector


def _attach(net: Any, injector: OnDemand | None) -> Any:
    if injector is not None:
        injector.attach(net)
    return net
