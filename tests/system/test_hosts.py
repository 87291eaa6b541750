"""Two hosts: roles started alone, keys on every wire, a lost node, a pulled cable, new keys."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from app.cli.keys import make, rotate
from app.cli.main import main
from app.cli.serve import plan_of
from deploy.placement.command import read_inputs
from deploy.placement.devices import save_profile
from deploy.placement.search.search import search
from deploy.placement.write import plan_of as planned
from tests.deploy.placement import samples
from tests.structs import changed
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.hosts import Host, Service
from tests.system.rig.streams import NUM_STREAMS, Load
from topspin.plan.file import print_plan, read_plan
from topspin.plan.network import NetworkSpec
from topspin.plan.settings import BalancePolicy, FailoverPolicy
from topspin.plan.spec import EnginePlan

CONTROL_PORT = 7400
GATEWAY_FLAGS = ("--served-model-name", "tiny", "--port", "0")


def plan_for(tiny: Tiny, host: Host) -> EnginePlan:
    """Return a plan of 2 x 2 nodes, the second of each role on `host`."""
    plan = plan_of(
        tiny.path,
        kv_cache_bytes=8 * 2**20,
        layout="shared",
        transport="tcp",
        attention_nodes=2,
        expert_nodes=2,
    )
    nodes = [
        changed(node, {"host": host.address if node.index else host.gateway}) for node in plan.nodes
    ]
    return changed(
        plan,
        {
            "nodes": tuple(nodes),
            "network": NetworkSpec(control=f"tcp://{host.gateway}:{CONTROL_PORT}"),
            "failover": FailoverPolicy(restart=True, restart_deadline_s=60.0),
            "balance": BalancePolicy(interval_s=1.0, half_life_pairs=64),
        },
    )


class Engine:
    """The services of one engine on two hosts."""

    def __init__(
        self, plan: EnginePlan, directory: Path, host: Host, stack: contextlib.ExitStack
    ) -> None:
        self.host, self.keys = host, directory / "keys"
        self.directory = directory
        self.plan_file = directory / "plan.yaml"
        self.plan_file.write_text(print_plan(plan))
        make(self.keys, sorted(plan.key_groups))
        self.services: dict[str, Service] = {}

        def start(name: str, *arguments: str, group: str, away: bool = False) -> None:
            common = ("--plan", str(self.plan_file), "--keys", str(self.keys / group))
            if group != "gateway":
                common = (*common, "--progress", str(directory / name))
            service = Service(directory, *arguments, *common, host=host if away else None)
            self.services[name] = stack.enter_context(service)

        start("scheduler", "scheduler", group="scheduler")
        for node in (*plan.experts, *plan.attention):
            arguments = ("node", node.role, "--index", str(node.index))
            is_away = node.host == host.address
            start(str(node), *arguments, group=node.role, away=is_away)
        self.urls = []
        gateways = ("gateway 0", "gateway 1")
        for name in gateways:
            start(name, "gateway", *GATEWAY_FLAGS, group="gateway")
        self.services["scheduler"].wait_for("scheduler: ready")
        for name in gateways:
            port = self.services[name].wait_for(r"listens on 127\.0\.0\.1 port (\d+)")
            self.urls.append(f"http://127.0.0.1:{port}")

    def lose_and_regain(self, name: str, *, by: Callable[[], None]) -> None:
        """Lose a node, and wait until it serves again."""
        scheduler = self.services["scheduler"]
        seen = len(scheduler.output)
        by()
        for text in (f"lost {name}", f"{name} joined", f"{name} has loaded", "scheduler: ready"):
            scheduler.wait_for(text, after=seen)


@pytest.fixture(scope="module")
def engine(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(Host())
        yield Engine(plan_for(tiny, host), tmp_path_factory.mktemp("hosts"), host, stack)


@pytest.mark.slow
@pytest.mark.slow
def test_a_plan_of_the_planner_over_two_hosts_gives_transformers_tokens(
    tiny: Tiny, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(Host())
        plan = planned_for(tiny, host, tmp_path)
        assert {node.host for node in plan.nodes} == {host.gateway, host.address}
        with Load(Engine(plan, tmp_path, host, stack).urls, tiny) as load:
            load.wait_for(NUM_STREAMS)
    assert load.wrong == []


def planned_for(tiny: Tiny, host: Host, directory: Path) -> EnginePlan:
    """Return the planner's best engine over a host here and one there, as it writes it."""
    save_profile(samples.cpu(cores=1), directory / "cpu.json")
    links = [{"transport": "shm", "alpha_us": 25, "gbps": 100}]
    hosts = [
        {"name": name, "devices": [{"device": "cpu.json"}], "links": links, "addresses": [address]}
        for name, address in (("here", host.gateway), ("there", host.address))
    ]
    link = {"transport": "tcp", "alpha_us": 100, "gbps": 10}
    lengths = {"prompt": {"mean": 20}, "output": {"mean": NUM_TOKENS}, "max_model_len": 128}
    contents = {
        "cluster": {"hosts": hosts, "between_hosts": link},
        "workload": lengths | {"users": NUM_STREAMS},
    }
    for name, content in contents.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(content))
    inputs, facts = read_inputs(
        directory / "cluster.yaml", str(tiny.path), directory / "workload.yaml"
    )
    over_hosts = [each for each in search(inputs).ratings if each.layout.spans]
    rater = inputs.rater()
    best = rater.at_load(max(over_hosts, key=rater.rank), NUM_STREAMS)
    path = directory / "planned.yaml"
    path.write_text(print_plan(planned(rater, best, path=str(tiny.path), facts=facts)))
    return read_plan(str(path))


def test_two_by_two_nodes_with_keys_give_transformers_tokens(engine: Engine, tiny: Tiny) -> None:
    with Load(engine.urls, tiny) as load:
        load.wait_for(2 * NUM_STREAMS)
        for name in ("scheduler", "expert 0", "expert 1", "attention 0", "attention 1"):
            assert main(["probe", str(engine.directory / name), "--ready"]) == 0
    assert load.wrong == []


@pytest.mark.slow  # below both are lost and regained, by a cable
@pytest.mark.parametrize("name", ["expert 1", "attention 1"])
def test_a_killed_node_on_the_other_host_costs_no_request(
    engine: Engine, tiny: Tiny, name: str
) -> None:
    starts = engine.services[name].num_starts
    with Load(engine.urls, tiny) as load:
        load.wait_for(NUM_STREAMS)
        engine.lose_and_regain(name, by=engine.services[name].kill)
        load.wait_for(4 * NUM_STREAMS)
    assert load.wrong == []
    assert engine.services[name].num_starts == starts + 1


@pytest.mark.slow
def test_a_partition_costs_no_request(engine: Engine, tiny: Tiny) -> None:
    """Nobody is told: both ends find out by themselves, and come together again."""
    with Load(engine.urls, tiny) as load:
        load.wait_for(NUM_STREAMS)
        seen = len(engine.services["scheduler"].output)
        engine.host.pull_cable()
        for name in ("expert 1", "attention 1"):
            engine.services["scheduler"].wait_for(f"lost {name}", after=seen)
        engine.host.plug_in()
        for name in ("expert 1", "attention 1"):
            engine.services["scheduler"].wait_for(f"{name} has loaded", after=seen)
        load.wait_for(4 * NUM_STREAMS)
    assert load.wrong == []


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_another_scheduler_costs_no_request(engine: Engine, tiny: Tiny, number: int) -> None:
    """Nor its nodes' weights, whether it is lost or ends in order.

    Experts have moved before, of which it knows nothing: these alone are read.
    """
    scheduler = engine.services["scheduler"]
    starts = {name: each.num_starts for name, each in engine.services.items()}
    with Load(engine.urls, tiny) as load:
        scheduler.wait_for("is in use", after=scheduler.output.rfind("starting"))
        seen = {name: len(each.output) for name, each in engine.services.items()}
        scheduler.kill(number)
        scheduler.wait_for("scheduler: ready", after=seen["scheduler"])
        load.wait_for(4 * NUM_STREAMS)
        for name in ("expert 0", "expert 1"):
            engine.services[name].wait_for("has read the experts", after=seen[name])
    assert load.wrong == []
    starts["scheduler"] += 1
    assert {name: each.num_starts for name, each in engine.services.items()} == starts


@pytest.mark.slow
def test_keys_are_rotated_under_load(engine: Engine, tiny: Tiny) -> None:
    """With a node lost after each step, which then comes back with the keys of that time."""
    starts = engine.services["scheduler"].num_starts
    with Load(engine.urls, tiny) as load:
        for step in ("add", "switch", "retire"):
            load.wait_for(NUM_STREAMS)
            rotate(engine.keys, step)
            engine.lose_and_regain("expert 1", by=engine.services["expert 1"].kill)
            load.wait_for(NUM_STREAMS)
    assert load.wrong == []
    assert engine.services["scheduler"].num_starts == starts


@pytest.mark.slow
def test_a_stranger_on_the_network_is_refused(engine: Engine, tiny: Tiny, tmp_path: Path) -> None:
    make(tmp_path / "other", ["scheduler", "gateway", "expert", "attention"])
    common = ("--plan", str(engine.plan_file), "--keys", str(tmp_path / "other" / "expert"))
    arguments = ("node", "expert", "--index", "1")
    with (
        Service(tmp_path, *arguments, *common, host=engine.host) as stranger,
        Load(engine.urls, tiny) as load,
    ):
        stranger.wait_for("keys or users differ")
        load.wait_for(NUM_STREAMS)
    assert load.wrong == []
