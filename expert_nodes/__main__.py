"""`python -m expert_nodes`: one expert node process."""

from expert_nodes.command import main

raise SystemExit(main())
