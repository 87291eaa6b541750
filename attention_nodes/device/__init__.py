"""Steps on a GPU: buffers there, copies both ways, and recordings of padded steps."""
