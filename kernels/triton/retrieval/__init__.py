"""Selection of keys by their product-quantised codes."""
