"""The scheduler's command line and process: `python -m server.scheduler`.

Owns arguments, signals and the exit status; everything else is service.py's. The parent
process passes the engine plan.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

from server.scheduler.engine_facts import read_facts
from server.scheduler.planning.telemetry import JournalNote
from server.scheduler.service import Service
from topspin.errors import ConfigError
from topspin.logs import REQUESTS, about, start_logging
from topspin.messages import choice_of, client_id
from topspin.plan.spec import load_serve_config
from topspin.process import CONFIG_ERROR_STATUS, follow_parent
from topspin.processes.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlServer
from topspin.processes.node_network import add_key_arguments, read_keys_of
from topspin.processes.progress import ProgressWord

if TYPE_CHECKING:  # engines of one host have no keys, and may lack the package that reads them
    from topspin.processes.keys import KeyDirectory

SIGN_OF_LIFE_S = 1.0


def main() -> int:
    """Run one engine's scheduler; returns its exit status."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m server.scheduler", description=__doc__)
    parser.add_argument("--config", required=True, help="the ServeConfig, JSON")
    parser.add_argument("--control", required=True, help="address to listen on, as ZeroMQ names it")
    add_key_arguments(parser)
    parser.add_argument("--dead-fd", type=int, help="where to write the pids of lost nodes")
    args = parser.parse_args()
    logger = start_logging("scheduler")
    try:
        keys = read_keys_of(args)
        return serve(args.config, args.control, logger, dead_fd=args.dead_fd, keys=keys)
    except ConfigError as error:
        logger.error("scheduler: %s", error)
        return CONFIG_ERROR_STATUS


def serve(
    config_path: str,
    control: str,
    logger: logging.Logger,
    *,
    dead_fd: int | None = None,
    keys: KeyDirectory | None = None,
) -> int:
    """Listen on `control` and serve the engine; raises ConfigError if that is impossible.

    With `dead_fd`, the process id of every lost node is written there, one per line, for the
    supervisor to end it: a node that counts as dead must not keep running. And 0 every second, by
    which the supervisor sees that this process is not dead itself.
    """
    relax_garbage_collection()
    plan = load_serve_config(config_path).plan
    facts = read_facts(plan.model, len(os.sched_getaffinity(0)))
    heartbeat = FAILOVER_HEARTBEAT if plan.failover.restart else RELAXED_HEARTBEAT
    channel = ControlServer(control, heartbeat=heartbeat, keys=keys)

    def report_dead(pid: int) -> None:
        if dead_fd is not None:
            with contextlib.suppress(OSError):  # the supervisor is ending
                os.write(dead_fd, f"{pid}\n".encode())

    word, told_s = ProgressWord.of_process(), 0.0

    def on_turn(is_ready: bool) -> None:
        nonlocal told_s
        word.set("working" if is_ready else "starting")
        if time.monotonic() >= told_s + SIGN_OF_LIFE_S:
            told_s = time.monotonic()
            report_dead(0)

    service = Service(
        channel,
        plan,
        facts,
        clock=time.monotonic,
        logger=logger,
        report_dead=report_dead,
        note=request_log(),
        on_turn=on_turn,
    )

    def stop(number: int, frame: FrameType | None) -> None:
        # Nodes of an engine that goes on without lost processes wait for another scheduler; their
        # own supervisor asks them to end.
        reason = f"the scheduler got {signal.Signals(number).name}"
        service.request_stop(reason, ends_nodes=not plan.failover.restart)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        return service.run()
    finally:
        channel.close()


def request_log() -> JournalNote:
    """Return what logs the policy's entries about requests."""
    log = logging.getLogger(REQUESTS)

    def note(
        what: str, request_id: str, fields: dict[str, object], *, is_bad: bool = False
    ) -> None:
        level = logging.WARNING if is_bad else logging.INFO
        if log.isEnabledFor(level):
            extra = about(request_id=client_id(request_id), choice=choice_of(request_id), **fields)
            log.log(level, "scheduler: request %s", what, extra=extra)

    return note


def relax_garbage_collection() -> None:
    """Collect rarely: a step makes thousands of small objects, none of them in a cycle.

    With Python's defaults a collection of everything adds 15-30 ms to every few steps of
    4,096 sequences (benchmarks/scheduler_overhead.py).
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
