"""Our image, built and run by Debian's container engine."""
