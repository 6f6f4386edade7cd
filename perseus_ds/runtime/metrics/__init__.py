"""Figures of a job for Prometheus: served over HTTP by rank 0, or written for node_exporter."""
