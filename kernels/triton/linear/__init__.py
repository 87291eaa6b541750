"""Products of rows with one weight, plain or quantised."""
