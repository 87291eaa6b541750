"""The load tester behind `topspin bench serve`, `sweep` and `compare`; imports no torch."""
