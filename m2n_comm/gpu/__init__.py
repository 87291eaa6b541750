"""Rows that stay on GPUs (`local` within one, `ipc_*` between two) or leave them (`staged`)."""
