"""Decisions of the simulated GPU: address spaces, kernels, faults. No sockets, an explicit clock."""
