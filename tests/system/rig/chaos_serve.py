"""`topspin serve` whose nodes are chaos nodes: the same flags, processes and supervisor."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from app.cli.flags import add_arguments
from app.cli.serve import asked_for, serve_config
from app.launch import supervisor
from app.launch.child_process import RoleCommand
from app.launch.engine import LaunchContext, launch, role_commands

NODES = ("attention_nodes", "expert_nodes", "attention_nodes.stages", "draft_nodes")


def chaos_commands(context: LaunchContext) -> list[RoleCommand]:
    """Return a real engine's commands, with nodes run through tests.system.rig.chaos_node."""
    return [_chaotic(command) for command in role_commands(context)]


def _chaotic(command: RoleCommand) -> RoleCommand:
    module = next((word for word in command.argv if word in NODES), None)
    if module is None:
        return command
    position = command.argv.index(module)
    argv = (*command.argv[:position], "tests.system.rig.chaos_node", *command.argv[position:])
    return replace(command, argv=argv)


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(sys.argv[2:])  # after "serve"
    supervisor.MAX_RESTARTS = 10**6  # a soak of losses is no fault of the configuration
    return launch(serve_config(asked_for(arguments)), roles=chaos_commands)


if __name__ == "__main__":
    sys.exit(main())
