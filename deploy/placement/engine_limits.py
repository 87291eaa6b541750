"""What this engine runs today, of all that a plan could say.

The one place to change when the engine learns something: the search then takes such plans too.
Until then it says what they would give. topspin.plan.combinations refuses them; a test holds this
module to it. Read by deploy.placement.units and deploy.placement.answers.
"""

from __future__ import annotations

from typing import Final

STAGES: Final = True
"""Layer ranges of an attention node on several devices (topspin.plan.stages: CPUs only)."""
LOCAL_LAYERS: Final = True
"""Attention nodes that hold the routed experts of chosen layers."""
SLOW_NODES: Final = True
"""Nodes on a CPU that are slowed down on purpose (`slow`)."""
