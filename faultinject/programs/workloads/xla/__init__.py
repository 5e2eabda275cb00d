"""JAX programs: XLA records their work as command buffers, and takes all its memory as one allocation."""
