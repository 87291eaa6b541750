"""`python -m expert_nodes`: one expert node process."""

from topspin.cores import settle_process

settle_process()  # before torch is imported: its libraries read the environment

from expert_nodes.command import main  # noqa: E402

raise SystemExit(main())
