"""`python -m draft_nodes`: one draft node process."""

from topspin.cores import settle_process

settle_process()  # before torch is imported: its libraries read the environment

from draft_nodes.command import main  # noqa: E402

raise SystemExit(main())
