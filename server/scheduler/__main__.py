"""`python -m server.scheduler`: the scheduler process of one engine."""

from server.scheduler.command import main

raise SystemExit(main())
