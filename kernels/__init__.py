"""All tensor operations of the serving path, implemented per kind of device.

`reference` is the plain torch oracle, `cpu` the fast version for hosts without a
GPU, `dispatch` chooses one of them at start, `sampling` turns logits into tokens.
Nothing here knows requests, checkpoints, transports or model families.
"""
