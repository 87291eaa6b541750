"""The loss of quality by formats of weights and of rows on the wire."""
