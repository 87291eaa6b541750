"""A role process for tests of the supervisor: `python dummy_role.py BEHAVIOUR [ARGUMENT...]`.

Stands in for a node, the scheduler or the gateway; needs no torch and starts at once.
"""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
from typing import NoReturn

from topspin.plan.spec import load_serve_config
from topspin.process import follow_parent


def say(text: str) -> None:
    print(text, flush=True)


def hold_back_sigterm() -> None:
    """From now on SIGTERM waits for wait_for_sigterm().

    A handler and signal.pause() would lose a signal that comes just before the pause.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def wait_for_sigterm() -> None:
    signal.sigwait({signal.SIGTERM})


def wait() -> NoReturn:
    """Report the pid, and SIGTERM when it comes; end with status 0."""
    hold_back_sigterm()
    say(f"pid {os.getpid()}")
    wait_for_sigterm()
    say("terminated")
    sys.exit(0)


def crash() -> None:
    """Write 25 lines and fail."""
    for number in range(25):
        say(f"line {number}")
    sys.exit(3)


def refuse_configuration() -> None:
    """End as a role with an unusable configuration does."""
    say("--port 1: Permission denied")
    sys.exit(2)


def raw_output() -> None:
    """Write irregular output: no newline at the end, no UTF-8, a very long line."""
    os.write(2, b"to stderr\n")
    os.write(1, b"bad \xff byte\r\n\n" + b"x" * 150_000 + b"\nno newline")


def die_by_signal(number: str = "9") -> None:
    os.kill(os.getpid(), int(number))


def is_first_life(marker: str) -> bool:
    """Say whether this role has not left the file `marker` before, and leave it."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def speak_and_freeze(fd: str, marker: str) -> None:
    """Give a sign of life and freeze; in a second life ask the supervisor to end."""
    if not is_first_life(marker):
        hold_back_sigterm()
        os.kill(os.getppid(), signal.SIGINT)
        wait()
    os.write(int(fd), b"0\n")
    os.kill(os.getpid(), signal.SIGSTOP)


def stubborn() -> None:
    """Ignore SIGTERM."""
    hold_back_sigterm()
    say("up")
    while True:
        wait_for_sigterm()
        say("ignored")


def signal_parent(*numbers: str) -> None:
    """Send the supervisor the first signal now and the next at SIGTERM; then end at SIGTERM."""
    hold_back_sigterm()
    for number in numbers:
        os.kill(os.getppid(), int(number))
        wait_for_sigterm()


def leave_a_grandchild() -> None:
    """Fail, leaving a process that holds the output pipe open."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    say(f"grandchild {child.pid}")
    os._exit(1)


def outlive(fifo: str) -> None:
    """After SIGTERM, continue until no process holds `fifo` open for writing."""
    hold_back_sigterm()
    reader = os.open(fifo, os.O_RDONLY)
    say("up")
    wait_for_sigterm()
    os.read(reader, 1)
    say("saw the others end")


def follow(fifo: str) -> None:
    """End when no process holds `fifo` open for writing; SIGTERM kills it."""
    with open(fifo, "rb") as others:
        say(f"pid {os.getpid()}")
        others.read()
    say("saw the others end")


def hold(fifo: str) -> None:
    """Hold `fifo` open for writing until SIGTERM."""
    os.open(fifo, os.O_WRONLY)
    wait()


def hold_in_a_second_life(fifo: str) -> None:
    """Die by a signal; in a second life hold `fifo` open for writing until SIGTERM."""
    if is_first_life(f"{fifo}.marker"):
        die_by_signal()
    hold(fifo)


def end_with(fifo: str) -> None:
    """After SIGTERM, end once a process holds `fifo` open for writing."""
    hold_back_sigterm()
    say("up")
    wait_for_sigterm()
    os.open(fifo, os.O_RDONLY)


def die_on_request(fifo: str) -> None:
    """Die by a signal once a process has opened `fifo` for writing and closed it again."""
    with open(fifo, "rb") as request:
        request.read()
    die_by_signal()


def inherited() -> None:
    """Report the process group, stdin and one inherited environment variable."""
    say(f"own group {os.getpgid(0) == os.getpid()}")
    say(f"stdin {os.readlink('/proc/self/fd/0')}")
    say(f"flavour {os.environ['FLAVOUR']}")


def gateway(config_path: str, control: str, listen_fd: str, num_refusals: str = "1") -> None:
    """Serve /health, which says our pid: with 503 `num_refusals` times, then 200."""
    config = load_serve_config(config_path)
    refusals = int(num_refusals)

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal refusals
            refusals -= 1
            body = b'{"state": "starting", "detail": "waiting for expert 0"}'
            self.send_response(200 if refusals < 0 else 503)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Pid", str(os.getpid()))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            say(f"{self.path}")

    server = http.server.HTTPServer(("", 0), Health, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(listen_fd))
    say(f"model {config.plan.model.path} control {control}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    server.server_activate()
    server.serve_forever()


if __name__ == "__main__":
    follow_parent()
    vars()[sys.argv[1]](*sys.argv[2:])
