"""`python -m server.gateway`: an import and a call; see server.gateway.service."""

from __future__ import annotations

import sys

from server.gateway.service import main

if __name__ == "__main__":
    sys.exit(main())
