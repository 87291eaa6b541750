"""The expert worker: the routed experts of one node.

Owns the weights of its share of experts and computes the rows that frames bring. Knows no
request, no sequence and no text: it follows StepTickets. Order of reading: worker.py,
experts.py, then versions.py and tables.py for experts that move; memory.py is
for experts on a device.
"""
