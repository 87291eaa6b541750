"""`python -m attention_nodes`: one attention node process."""

from attention_nodes.command import main

raise SystemExit(main())
