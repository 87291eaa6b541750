"""The engine plan: its structure, its checks, its file, and the flags that write it."""
