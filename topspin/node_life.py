"""How a node joins an engine: Hello, then Welcome or Refused.

Owns the node's half of that exchange and the common life of a node process around it:
errors become a Goodbye and an exit status. Knows no tensors and no step; the workers
call it. The scheduler's half is server.scheduler.roster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from topspin.channel import RELAXED_HEARTBEAT, ControlClient, Heartbeat
from topspin.errors import ConfigError, PeerLost, ProtocolError, TopspinError, VersionMismatch
from topspin.messages import (
    Goodbye,
    Hello,
    Refused,
    Role,
    StepFailed,
    StepTicket,
    Stop,
    Topology,
    Welcome,
)
from topspin.process import CONFIG_ERROR_STATUS


class Stopped(Exception):
    """The scheduler asked this node to stop; not an error."""


def join(control: ControlClient, hello: Hello) -> Welcome:
    """Introduce this node and return the Welcome that comes once the engine is complete.

    Raises VersionMismatch with the scheduler's reason if it refuses, Stopped if the engine
    stops first, PeerLost if the scheduler goes.
    """
    control.send(hello)
    return await_welcome(control)


def await_welcome(control: ControlClient) -> Welcome:
    """Return the answer to a Hello that was sent already; raises as `join`."""
    answer = control.recv()
    if isinstance(answer, Refused):
        raise VersionMismatch(answer.reason)
    if isinstance(answer, Stop):
        raise Stopped(answer.reason)
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"expected Welcome, got {type(answer).__name__}")
    return answer


def step_failed(ticket: StepTicket, role: Role, index: int, error: Exception) -> StepFailed:
    """Return the report that this node could not finish the step of `ticket`."""
    code = error.code if isinstance(error, TopspinError) else "internal_error"
    return StepFailed(
        step=ticket.step,
        generation=ticket.generation,
        role=role,
        index=index,
        code=code,
        message=str(error) or type(error).__name__,
    )


def reform_failed(topology: Topology, role: Role, index: int, error: Exception) -> StepFailed:
    """Return the report that this node could not connect in the generation of `topology`."""
    code = error.code if isinstance(error, TopspinError) else "internal_error"
    return StepFailed(
        step=0,
        generation=topology.generation,
        role=role,
        index=index,
        code=code,
        message=str(error) or type(error).__name__,
    )


def run_node(
    role: Role,
    index: int,
    address: str,
    *,
    logger: logging.Logger,
    body: Callable[[ControlClient], None],
    heartbeat: Heartbeat = RELAXED_HEARTBEAT,
) -> int:
    """Run `body` with a control connection to `address`; return the process's exit status.

    0 after an orderly stop; after an error, which is logged and told to the scheduler, 1, or
    2 if the node was configured with what it cannot do.
    """
    control = ControlClient(address, heartbeat=heartbeat)
    try:
        body(control)
    except (Stopped, KeyboardInterrupt):
        return 0
    except PeerLost as error:
        logger.error("%s %d: %s", role, index, error)
        return 1
    except TopspinError as error:
        logger.error("%s %d: %s", role, index, error)
        control.send(Goodbye(role=role, index=index, code=error.code, message=str(error)))
        return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else 1
    except Exception as error:
        logger.exception("%s %d failed", role, index)
        message = f"{type(error).__name__}: {error}"
        control.send(Goodbye(role=role, index=index, code="internal_error", message=message))
        return 1
    finally:
        control.close()
    return 0
