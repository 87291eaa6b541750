"""The nodes of the engine: who serves, messages to them, and recovery when one is lost."""
