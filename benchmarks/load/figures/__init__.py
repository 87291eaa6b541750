"""The figures of a load test, and how they are shown: table, JSON, page."""
