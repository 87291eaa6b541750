"""A tenant's flood: what another tenant gets meanwhile, from a server that this starts.

Two tenants with a key each. One keeps 4 connections, the other as many as the server has places for
running requests, and then 200: the flood. Both always ask again. Run as
`python -m benchmarks.tenants [MODEL] [--max-ttft S ...]`.
"""

from __future__ import annotations

import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.experiment import Experiment, Result, TextTable, say, table
from benchmarks.load.started_server import StartedServer, free_port
from benchmarks.servers.topspin import add_server_arguments

FEW, PLACES, FLOOD = 4, 64, 200
KEYS = {"few": "sk-few-0123456789", "many": "sk-many-0123456789"}
LENGTHS = ("--random-input-len", "64", "--random-output-len", "32")
NUM_REQUESTS = 60
STOP_S = 60.0
_COLUMNS = {
    "connections of the other": "{connections:.0f}",
    "requests/s": "{request_throughput:.2f}",
    "tokens/s": "{output_throughput:.1f}",
    "TTFT p50 ms": "{median_ttft_ms:.0f}",
    "p99": "{p99_ttft_ms:.0f}",
    "TPOT p50 ms": "{median_tpot_ms:.0f}",
    "refused": "{refused:.0f}",
    "the other's tokens/s": "{others_throughput:.1f}",
    "refused ": "{others_refused:.0f}",
}


def client(
    server: StartedServer, tenant: str, folder: Path, *flags: str
) -> subprocess.Popen[bytes]:
    """Start the load of one tenant; its figures go to a file of its name."""
    command = [sys.executable, "-m", "topspin", "bench", "serve", "--base-url", server.url]
    command += ["--api-key", KEYS[tenant], *LENGTHS, "--disable-tqdm", "--save-result"]
    command += ["--result-dir", str(folder), "--result-filename", f"{tenant}.json", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def figures(folder: Path, tenant: str) -> dict[str, Any]:
    """Return what a load measured."""
    found: dict[str, Any] = msgspec.json.decode((folder / f"{tenant}.json").read_bytes())
    return found


def beside(server: StartedServer, connections: int) -> Result:
    """Return the figures of the tenant with few connections, beside so many of the other."""
    seed = str(random.Random(connections).randrange(2**31))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flood = ("--max-concurrency", str(connections), "--num-prompts", "100000", "--seed", "1")
        many = client(server, "many", folder, *flood)
        asked = ("--max-concurrency", str(FEW), "--num-prompts", str(NUM_REQUESTS), "--seed", seed)
        status = client(server, "few", folder, *asked).wait()
        many.send_signal(2)  # it writes what it has
        many.wait(STOP_S)
        if status:
            raise SystemExit("the tenant with few connections got no answer")
        own, other = figures(folder, "few"), figures(folder, "many")
    return {
        "connections": connections,
        **{key: own[key] for key in ("request_throughput", "output_throughput")},
        **{key: own[key] for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")},
        "refused": own["topspin"]["refused"],
        "others_throughput": other["output_throughput"],
        "others_refused": other["topspin"]["refused"],
    }


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield the rows, and the flood against a full server without one."""
    yield f"{result['model']}: a tenant of {FEW} connections beside another one"
    yield table(_COLUMNS, _medians(result["rounds"]))
    full, flood = (_median(result["rounds"], each) for each in (PLACES, FLOOD))
    share = flood["output_throughput"] / full["output_throughput"]
    ttft = flood["median_ttft_ms"] / full["median_ttft_ms"]
    yield f"The flood leaves it {share:.0%} of its tokens/s, and {ttft:.2f}x its TTFT."


def _medians(rounds: Iterable[list[Result]]) -> list[Mapping[str, Any]]:
    found = list(rounds)
    return [_median(found, connections) for connections in (FEW, PLACES, FLOOD)]


def _median(rounds: Iterable[list[Result]], connections: int) -> Result:
    rows = [row for each in rounds for row in each if row["connections"] == connections]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


EXPERIMENT = Experiment("tenants", __doc__, layout, command="python -m benchmarks.tenants")


def main() -> int:
    """Run the command; returns the exit status."""
    parser = EXPERIMENT.parser(rounds=2)
    add_server_arguments(parser)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{tenant}: {key}\n" for tenant, key in KEYS.items()))
        keys.chmod(0o600)
        port = free_port()
        command = [sys.executable, "-P", "-m", "topspin", "serve", args.model, *flags]
        command += ["--port", str(port), "--api-key-file", str(keys)]
        with StartedServer(
            shlex.join(command),
            url=f"http://127.0.0.1:{port}",
            log=Path(folder) / "server.log",
            ready_timeout_s=args.start_timeout,
        ) as server:

            def measure(turn: int) -> list[Result]:
                found = []
                for connections in (FEW, PLACES, FLOOD):
                    say(f"round {turn + 1}: beside {connections} connections")
                    found.append(beside(server, connections))
                return found

            about = {"model": args.model, "flags": flags}
            return EXPERIMENT.run_rounds(args, measure, lambda rounds: {**about, "rounds": rounds})


if __name__ == "__main__":
    sys.exit(main())
