"""Rows carried by the CPU: `local`, `shm` and `tcp`, and the rules that they share.

attention_side.py and expert_side.py keep the rules of M2N over `lines.PairLines`; a transport only
moves windows.
"""
