"""Workloads that use cuda-bindings."""
