"""One gateway process between a stub engine and many clients."""
