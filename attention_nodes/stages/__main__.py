"""`python -m attention_nodes.stages`: the process of one stage of an attention node."""

from topspin.cores import settle_process

settle_process()  # before torch is imported: its libraries read the environment

from attention_nodes.stages.command import main  # noqa: E402

raise SystemExit(main())
