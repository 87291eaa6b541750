"""The placement of experts: observed load, copies of hot experts, and the resulting tables."""
