"""`python -m topspin`: the same as the `topspin` command."""

from __future__ import annotations

import sys

from app.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
