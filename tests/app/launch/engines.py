"""Engines to launch: their configuration, and what their roles are given."""

from __future__ import annotations

from typing import Any

from app.launch.engine import LaunchContext
from tests.topspin.plans import plan
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import ServeConfig


def engine(**settings: Any) -> ServeConfig:
    """Return one attention and two expert nodes on the CPU over shm, but for `settings`."""
    usual = {"expert_nodes": 2, "transport": "shm", "restart": False, "layout": "shared"}
    made = plan(path="/models/it's tiny", **(usual | settings))
    return ServeConfig(plan=made, gateway=GatewaySection(port=0, served_names=("it's tiny",)))


def context_of(config: ServeConfig) -> LaunchContext:
    """Return what the roles of `config` are given, with descriptors that nobody opened."""
    return LaunchContext(config=config, control="ipc://@c", config_fd=7, listen_fd=8, dead_fd=9)
