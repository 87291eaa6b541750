"""`python -m draft_nodes.beside_attention`: an attention node whose drafts a draft model makes.

The same command line as `python -m attention_nodes`. Without draft nodes the model computes here,
before each step that may have drafts, in the node's one busy thread: nothing overlaps.
"""

from functools import partial

from topspin.cores import settle_process

settle_process()  # before torch is imported: its libraries read the environment

from attention_nodes.command import main  # noqa: E402
from draft_nodes.drafter import make_drafter  # noqa: E402

raise SystemExit(main(lambda network: partial(make_drafter, keys=network.keys)))
