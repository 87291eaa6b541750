"""From the engine's outputs to an HTTP answer: text, stop strings, JSON and events."""
