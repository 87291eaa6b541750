"""What operators ask a gateway: health, metrics, traces. Knows no request's content."""
