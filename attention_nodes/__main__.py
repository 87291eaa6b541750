"""`python -m attention_nodes`: one attention node process."""

from topspin.cores import settle_process

settle_process()  # before torch is imported: its libraries read the environment

from attention_nodes.command import main  # noqa: E402

raise SystemExit(main())
