"""What watches an engine: a Grafana dashboard and Prometheus alerts, made from the metrics."""
