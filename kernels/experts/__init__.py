"""A layer's experts, whatever their kernels: slots, formats side by side, and counts."""
