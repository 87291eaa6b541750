"""Plans of several hosts: what they need, and what only they may have."""

from __future__ import annotations

import pytest

from tests.structs import changed
from tests.topspin.plans import plan
from topspin.errors import ConfigError
from topspin.plan.file import print_plan, read_plan
from topspin.plan.network import NetworkSpec
from topspin.plan.spec import EnginePlan

CONTROL = "tcp://10.0.0.1:7000"


def spread(transport: str = "tcp", *, trusted: bool = False, host: str = "10.0.0.2") -> EnginePlan:
    """Return a plan whose last node is on another host."""
    whole = plan()
    nodes = [changed(node, {"host": "10.0.0.1"}) for node in whole.nodes]
    nodes[-1] = changed(nodes[-1], {"host": host})
    link = changed(whole.links[0], {"transport": transport})
    return changed(
        whole,
        {
            "nodes": tuple(nodes),
            "links": (link,),
            "network": NetworkSpec(control=CONTROL, trusted=trusted),
        },
    )


def test_hosts_keys_and_network_are_kept(tmp_path: object) -> None:
    whole = changed(spread(), {"nodes": tuple(changed(n, {"key": "gpu"}) for n in spread().nodes)})
    whole.check()
    path = f"{tmp_path}/plan.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(print_plan(whole))
    assert read_plan(path) == whole
    assert whole.key_groups == {"scheduler", "gateway", "gpu"}
    assert spread().key_groups == {"scheduler", "gateway", *(n.role for n in spread().nodes)}
    assert "network" not in print_plan(plan())


@pytest.mark.parametrize(
    "control", ["", "10.0.0.1:7000", "tcp://10.0.0.1", "tcp://:7000", "tcp://h:0", "ipc://x:1"]
)
def test_a_control_address_has_host_and_port(control: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.control .* is not tcp://HOST:PORT"):
        changed(spread(), {"network": NetworkSpec(control=control)}).check()


def test_memory_is_shared_on_one_host_only() -> None:
    with pytest.raises(ConfigError, match=r"shm joins .* on 10\.0\.0\.1, 10\.0\.0\.2; use tcp"):
        spread("shm").check()
    spread("shm", host="10.0.0.1").check()
    with pytest.raises(ConfigError, match="transport local: it joins threads"):
        spread("local").check()


def test_one_sided_writes_need_a_trusted_network() -> None:
    with pytest.raises(ConfigError, match=r"no authentication; set network\.trusted"):
        spread("nixl").check()
    spread("nixl", trusted=True).check()
    spread("nixl", host="10.0.0.1").check()
