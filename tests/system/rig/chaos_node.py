"""A real node that disturbs its next frame on a signal.

`python -m tests.system.rig.chaos_node MODULE [ARGUMENT...]` runs `python -m MODULE ARGUMENT...`
with faults attached to its net: SIGUSR1 drops the next frame, SIGUSR2 sends it twice, SIGRTMIN
sends it after the one that follows, SIGRTMIN+1 delays it by half a second. On SIGRTMIN+2 it hangs
in Python for ever, while its other threads go on.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from types import FrameType

from tests.faults import OnDemand, faulty_nets
from tests.m2n_comm.faults import Delay, Drop, Duplicate, Fault, Reorder

FAULT_OF_SIGNAL: dict[int, Fault] = {
    signal.SIGUSR1: Drop(),
    signal.SIGUSR2: Duplicate(),
    signal.SIGRTMIN: Reorder(),
    signal.SIGRTMIN + 1: Delay(0.5),
}
HANG = signal.SIGRTMIN + 2


def main() -> int:
    """Run the node; returns its exit status."""
    injector = OnDemand()

    def on_signal(number: int, frame: FrameType | None) -> None:
        injector.fault = FAULT_OF_SIGNAL[number]

    for number in FAULT_OF_SIGNAL:
        signal.signal(number, on_signal)
    signal.signal(HANG, lambda number, frame: threading.Event().wait())
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    status: int
    with faulty_nets(lambda role, index: injector):
        status = importlib.import_module(f"{module}.command").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
