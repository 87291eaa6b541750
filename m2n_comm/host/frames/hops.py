"""One frame's way out or in as an op of a step: written and published, or awaited and read.

Owns the ops, kernels of `kernels.cpu.compiled` that one thread runs alone: on an attention node
`send_rows`, `await_frame`, `add_rows`, on an expert node `await_frame`, `take_rows`, `send_answer`.
native.py does the frame's work in each. In a recorded step they are part of the program, so a hop
needs no Python; what they cannot do (a long wait, a frame that must be refused, lines with an empty
port) they leave undone, and the sides do it in Python with all checks. Knows no order of calls.

Waiting: this thread yields its core, since on shared cores the peer that it waits for may need it,
and a core that sleeps takes tens of microseconds to wake. After YIELD_NS (on a connection, where
each look is a system call, PATIENCE_NS) Python waits, asleep.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.compiled.runtime import Kernel, inlined, offsets
from kernels.cpu.simd.lanes import read_i64, write_i64
from kernels.cpu.simd.system import (
    exchange_shared,
    now_ns,
    read_shared,
    ring,
    thread_ns,
    yield_core,
)
from kernels.cpu.simd.tasks import leave_undone
from kernels.frame_header import word
from m2n_comm.host.frames import records
from m2n_comm.host.frames.native import (
    add_answers,
    copy_request,
    take_request,
    write_answer,
    write_request,
)
from m2n_comm.host.frames.tcp_frames import (
    AWAITS,
    CODED,
    ENDED,
    GOT,
    IS_CODED,
    IS_PLACED,
    MAX_PATIENCE_NS,
    NOTHING,
    OURS,
    PATIENCE_NS,
    PLACE,
    PLACE_ROWS,
    add_segment,
    read_frame,
    seal_frame,
    send_segments,
)
from m2n_comm.host.frames.wire import HEADER_BYTES

YIELD_NS: Final = 2_000_000
"""How long a hop of a step is awaited awake: several times as long as a usual layer takes."""

# Below this the frame had already arrived.
WAITED_NS: Final = 5_000

STEP, VERSION = range(0, 16, 8)
"""The words of a step that ops read."""

NUM_ANSWERS, WAIT_NS, LINK_NS, NUM_LINKS, EXPERT_NS = range(0, 40, 8)
"""An attention node's times since begin(): answers, waits, trips that nobody waited for; from
EXPERT_NS on each expert node's computing."""

GATHERED_NS, IDLE_NS, BEGAN_NS, BUSY_NS = range(0, 32, 8)
"""An expert node's times: when the newest batch's rows were there, how long it waited for them; the
time that its thread had had a core by then, and has had for all batches."""

(
    RECORD, CHOSEN, COLUMNS, NUM_COLUMNS, NUM_ROWS, HIDDEN, WEIGHTS, LAYER, PART, STEP_WORDS,
) = offsets(10)  # fmt: skip
"""The arguments of `send_rows`; see native.write_request."""

AWAITED, ROWS_TO, MAX_ROWS = offsets(3)
"""The arguments of `await_frame`: the address of a word with the record's address; on a connection
ROWS_TO, if not 0, takes the frame's hidden rows, at most MAX_ROWS, in place of the inbox."""

ANSWERED, NUM_ANSWERED, OUT, FILLS, TIMES = offsets(5)
"""The arguments of `add_rows`: as native.add_answers; TIMES of all expert nodes."""

(
    TAKEN, TAKEN_LAYER, TAKEN_PART, MAX_PARTS, TAKEN_STEP, NUM_SLOTS, BUCKET, ROWS, SLOTS,
    WEIGHTS_OUT, BATCH, IS_FIRST,
) = offsets(12)  # fmt: skip
"""The arguments of `take_rows`: TAKEN as AWAITED; the rest as native.take_request and copy_request,
SLOTS 0: the rows are not copied; BATCH are the batch's times; IS_FIRST of its participants."""

ANSWERING, PARTIAL, SERVED, IS_LAST = offsets(4)
"""The arguments of `send_answer`: as AWAITED; rows in the payload's dtype, the batch's times;
IS_LAST of its participants. PARTIAL 0: the rows are in the outbox."""

_OUT_FLAG, _OUT_IS_AWAKE, _BELL, _IN_FLAG, _IN_IS_AWAKE, _CONSUMED, _LINE, _BLOCK = range(
    8 * records.OUT_FLAG, 8 * records.BLOCK + 1, 8
)
_OUT_HEADER, _OUT_SLOTS, _OUT_WEIGHTS, _OUT_HIDDEN, _IN_HEADER = range(
    8 * records.OUT_HEADER, 8 * records.IN_HEADER + 1, 8
)
_SENT_NS, _WAIT_BEGAN_NS, _ARRIVED_NS = range(8 * records.SENT_NS, 8 * records.ARRIVED_NS + 1, 8)
_ROWS, _ROW_BYTES, _TOP_K = 8 * records.ROWS, 8 * records.ROW_BYTES, 8 * records.TOP_K
_ANSWER_ROWS, _IS_PLAIN = 8 * records.ANSWER_ROWS, 8 * records.IS_PLAIN
_RUNS_AT, _NUM_RUNS = 8 * records.RUNS_AT, 8 * records.NUM_RUNS
_EXPERT, _COUNT, _SHAPER = 8 * records.EXPERT, 8 * records.COUNT, 8 * records.SHAPER
_SIZE, _DELIVER, _COMPUTE, _IDLE = (
    8 * word(name) for name in ("payload_bytes", "deliver_ns", "compute_ns", "idle_ns")
)


@inlined
def _publish(block: int, record: int, sequence: int, hidden: int) -> None:
    """Publish the outbox; ring a reader that sleeps. With an empty port Python does both.

    Over an emulated link the frame gets its delivery time first, as emulate.LinkShaper tells it.
    On a connection the hidden rows at `hidden` are sent from there; what the kernel does not take
    at once, and what needs a delivery time, Python sends.
    """
    flag, link, line = (
        read_i64(record + _OUT_FLAG), read_i64(record + _SHAPER), read_i64(record + _LINE)
    )  # fmt: skip
    if line:
        is_python = read_i64(line + IS_CODED) != 0 and read_i64(line + OURS) == 0
        if link or is_python or not _send(record, line, hidden):
            leave_undone(block)
    elif not flag:
        leave_undone(block)
    else:
        if link:
            header = read_i64(record + _OUT_HEADER)
            size = HEADER_BYTES + read_i64(header + _SIZE)
            free_ns = max(now_ns(), read_i64(link)) + size * read_i64(link + 16) // 1000
            write_i64(link, free_ns)
            write_i64(header + _DELIVER, free_ns + read_i64(link + 8))
        exchange_shared(flag, sequence)
        if not read_shared(read_i64(record + _OUT_IS_AWAKE)):
            ring(read_i64(record + _BELL))


@inlined
def _send(record: int, line: int, hidden: int) -> bool:
    """Send the frame that write_request or write_answer has written; False: not all of it.

    `hidden` is where its rows are: those of a request in the record's runs of them, if it has any.
    """
    header, rows = read_i64(record + _OUT_HEADER), read_i64(record + _ANSWER_ROWS)
    row_bytes = read_i64(record + _ROW_BYTES)
    count = add_segment(line, 0, header, HEADER_BYTES)
    num_runs = 0
    if read_i64(record + _OUT_SLOTS):
        rows = read_i64(record + _ROWS)
        routing_bytes = rows * read_i64(record + _TOP_K) * 4
        count = add_segment(line, count, read_i64(record + _OUT_SLOTS), routing_bytes)
        count = add_segment(line, count, read_i64(record + _OUT_WEIGHTS), routing_bytes)
        num_runs = read_i64(record + _NUM_RUNS)
        if not num_runs:
            hidden = 0
    for idx in range(num_runs):
        ends = read_i64(read_i64(record + _RUNS_AT) + 8 * idx)
        first, end = ends & 0xFFFFFFFF, ends >> 32
        count = add_segment(line, count, hidden + first * row_bytes, (end - first) * row_bytes)
    if not num_runs:
        if not hidden:
            hidden = read_i64(record + _OUT_HIDDEN)
        count = add_segment(line, count, hidden, rows * row_bytes)
    seal_frame(line, header, count)
    write_i64(read_i64(record + _BLOCK) + AWAITS, 1)
    return send_segments(line, count)


@Kernel
def send_rows(block: int) -> None:
    """Write and publish a part of an expert node's share; undone before that for an unknown id.

    A frame whose rows do not travel as they are is not published.
    """
    record, step = read_i64(block + RECORD), read_i64(block + STEP_WORDS)
    sequence = read_i64(read_i64(record + _COUNT)) + 1
    write_i64(record + _SENT_NS, 0)
    rows = write_request(
        record,
        read_i64(block + CHOSEN),
        read_i64(block + COLUMNS),
        read_i64(block + NUM_COLUMNS),
        read_i64(block + NUM_ROWS),
        read_i64(block + HIDDEN),
        read_i64(block + WEIGHTS),
        read_i64(block + LAYER),
        read_i64(block + PART),
        read_i64(step + VERSION),
        read_i64(step + STEP),
        sequence,
    )
    if rows < 0:
        leave_undone(block)
    else:
        write_i64(read_i64(record + _COUNT), sequence)
        write_i64(record + _SENT_NS, now_ns())
        if read_i64(record + _IS_PLAIN):
            _publish(block, record, sequence, read_i64(block + HIDDEN))
        else:
            leave_undone(block)


@Kernel
def await_frame(block: int) -> None:
    """Wait for the next frame in the inbox, and count it; undone if Python has to see it first."""
    record = read_i64(read_i64(block + AWAITED))
    began_ns = now_ns()
    write_i64(record + _WAIT_BEGAN_NS, began_ns)
    flag, line = read_i64(record + _IN_FLAG), read_i64(record + _LINE)
    if not flag:
        leave_undone(block)
        return
    consumed = read_i64(read_i64(record + _CONSUMED))
    found, arrived_ns = read_shared(flag), began_ns
    patience_ns, state, got = YIELD_NS, NOTHING, 0
    if line and found == consumed:
        write_i64(read_i64(record + _BLOCK) + PLACE, read_i64(block + ROWS_TO))
        write_i64(read_i64(record + _BLOCK) + PLACE_ROWS, read_i64(block + MAX_ROWS))
        patience_ns, state = PATIENCE_NS, read_frame(line)
        found = read_shared(flag)
    if found == consumed:
        write_i64(read_i64(record + _IN_IS_AWAKE), 1)
        until_ns = began_ns + patience_ns
        while found == consumed and arrived_ns < until_ns:
            if state == NOTHING:
                yield_core()
            if line:
                state = read_frame(line)
                if state == CODED or state >= ENDED:
                    break
                if read_i64(line + GOT) != got:
                    got = read_i64(line + GOT)
                    until_ns = min(now_ns() + PATIENCE_NS, began_ns + MAX_PATIENCE_NS)
            found, arrived_ns = read_shared(flag), now_ns()
    deliver_ns = read_i64(read_i64(record + _IN_HEADER) + _DELIVER)
    if found != consumed + 1 or deliver_ns - arrived_ns > YIELD_NS:
        leave_undone(block)
        return
    while arrived_ns < deliver_ns:
        yield_core()
        arrived_ns = now_ns()
    write_i64(read_i64(record + _CONSUMED), found)
    write_i64(record + _ARRIVED_NS, arrived_ns)


@inlined
def _add(word_at: int, number: int) -> None:
    write_i64(word_at, read_i64(word_at) + number)


@inlined
def _count(times: int, record: int) -> None:
    """Count the times of an answer."""
    header = read_i64(record + _IN_HEADER)
    arrived_ns = read_i64(record + _ARRIVED_NS)
    waited_ns = arrived_ns - read_i64(record + _WAIT_BEGAN_NS)
    computed_ns = read_i64(header + _COMPUTE)
    _add(times + NUM_ANSWERS, 1)
    _add(times + WAIT_NS, waited_ns)
    _add(times + EXPERT_NS + 8 * read_i64(record + _EXPERT), computed_ns)
    if waited_ns > WAITED_NS and read_i64(header + _IDLE) > WAITED_NS:
        trip_ns = arrived_ns - read_i64(record + _SENT_NS)
        _add(times + LINK_NS, max(0, trip_ns - computed_ns) // 2)
        _add(times + NUM_LINKS, 1)


@Kernel
def add_rows(block: int) -> None:
    """Check and add up the answers that have arrived, and count their times; undone if wrong."""
    records, num_records = read_i64(block + ANSWERED), read_i64(block + NUM_ANSWERED)
    if add_answers(records, num_records, read_i64(block + OUT), read_i64(block + FILLS)) < 0:
        leave_undone(block)
        return
    times = read_i64(block + TIMES)
    for idx in range(num_records):
        _count(times, read_i64(records + 8 * idx))


@Kernel
def take_rows(block: int) -> None:
    """Check a request that has arrived, and copy its rows; undone if it is wrong or too large."""
    record, step = read_i64(read_i64(block + TAKEN)), read_i64(block + TAKEN_STEP)
    sequence, bucket = read_i64(read_i64(record + _COUNT)) + 1, read_i64(block + BUCKET)
    rows = take_request(
        record,
        read_i64(block + TAKEN_LAYER),
        read_i64(block + TAKEN_PART),
        read_i64(block + MAX_PARTS),
        read_i64(step + VERSION),
        read_i64(step + STEP),
        sequence,
        read_i64(block + NUM_SLOTS),
    )
    if rows < 0 or rows > bucket:
        leave_undone(block)
        return
    write_i64(read_i64(record + _COUNT), sequence)
    hidden, slots = read_i64(block + ROWS), read_i64(block + SLOTS)
    if slots:
        if read_i64(record + _LINE) and read_i64(read_i64(record + _BLOCK) + IS_PLACED):
            hidden = 0
        copy_request(record, hidden, slots, read_i64(block + WEIGHTS_OUT), bucket)
    batch, arrived_ns = read_i64(block + BATCH), read_i64(record + _ARRIVED_NS)
    write_i64(batch + GATHERED_NS, arrived_ns)
    if read_i64(block + IS_FIRST):
        write_i64(batch + IDLE_NS, 0)
    _add(batch + IDLE_NS, arrived_ns - read_i64(record + _WAIT_BEGAN_NS))
    write_i64(batch + BEGAN_NS, thread_ns())


@Kernel
def send_answer(block: int) -> None:
    """Write and publish the answer to the request that was taken."""
    record, batch = read_i64(read_i64(block + ANSWERING)), read_i64(block + SERVED)
    computed_ns = now_ns() - read_i64(batch + GATHERED_NS)
    partial = read_i64(block + PARTIAL)
    copied = 0 if read_i64(record + _LINE) else partial
    write_answer(record, copied, computed_ns, read_i64(batch + IDLE_NS))
    if read_i64(block + IS_LAST):
        _add(batch + BUSY_NS, thread_ns() - read_i64(batch + BEGAN_NS))
    _publish(block, record, read_i64(read_i64(record + _COUNT)), partial)


def prepare() -> None:
    """Compile the ops, so that no step waits."""
    for kernel in (send_rows, await_frame, add_rows, take_rows, send_answer):
        kernel.address  # noqa: B018, compiles it
