"""One fault of each kind beside programs that mpsd protects without a configuration."""
