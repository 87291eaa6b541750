"""A request as the engine runs it: parameters and prompts in, choices that grow."""
