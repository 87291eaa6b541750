"""The M2N between the nodes of a rig, in one process or in two.

Owns who the two nodes are to each other. Knows no step. Called by app.launch.trial, by
deploy.profiling.rally and by benchmarks.
"""

from __future__ import annotations

from attention_nodes.step.model_runner import ModelRunner
from deploy.rig.nodes import Rig, table_of
from expert_nodes.experts import Experts
from m2n_comm.emulate import LinkEmulation
from m2n_comm.gpu.local import takes_rows_of_host
from m2n_comm.host.local import LocalHub
from m2n_comm.net import AttentionNet, ExpertNet, wait_policy
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from topspin.messages import ExpertPeer
from topspin.plan.spec import NodeConfig

TIMEOUT_S = 60.0
# Any numbers that name the two processes.
_ATTENTION, _EXPERT = 1, 2


def local_net(rig: Rig, runner: ModelRunner, experts: Experts) -> AttentionNet:
    """Return the net of both nodes in one process, as `--transport local` opens it."""
    shape = runner.net_shape(rig.config)
    if takes_rows_of_host(rig.config, shape):
        return rig.device_net(runner, experts.compute)
    hub = LocalHub(shape, 1, 1)
    hub.attach_expert(0, experts.compute, table=table_of(rig.model))
    return hub.attention_net(0, table_of(rig.model))


class ProcessPair:
    """The nodes of a rig in two processes: forks of the one that opens the pair, or itself one."""

    def __init__(self, rig: Rig, config: NodeConfig | None = None) -> None:
        """Listen, over the transport of `config`, by which nodes wait too (None: the rig's)."""
        self._config = config or rig.config
        self._table = table_of(rig.model)
        self._waits = Waits(timeout_s=TIMEOUT_S, policy=wait_policy(self._config))
        transport = self._config.link.transport
        assert transport != "local", "two processes"
        self._listener = listen_expert(transport)

    def accept(self, experts: Experts) -> ExpertNet:
        """Return the expert node's end, once the other has connected."""
        shape = experts.net_shape(self._config)
        me = Identity(role="expert", index=0, incarnation=_EXPERT, shape=shape)
        return self._listener.accept(me, [_ATTENTION], self._table, self._waits)

    def connect(self, runner: ModelRunner, *, link: LinkEmulation | None = None) -> AttentionNet:
        """Return the attention node's end, over an emulated `link` if one is given."""
        shape = runner.net_shape(self._config)
        return connect_attention(
            Identity(role="attention", index=0, incarnation=_ATTENTION, shape=shape),
            [ExpertPeer(address=self._listener.address, incarnation=_EXPERT)],
            self._table,
            self._waits,
            link=link,
        )

    def close(self) -> None:
        """Stop listening in this process; the nets go on."""
        self._listener.close()
