"""The processes of a planned engine as services of a cluster, whatever starts them."""
