"""mpsd-exporter: the daemon's status as Prometheus metrics."""
