"""The commands and plans of README and docs, run as they stand there."""
