"""Observability of an engine: a Grafana dashboard and Prometheus alert rules, as data files."""
