"""Health, metrics and traces of a gateway, for operators. Knows no request's content."""
