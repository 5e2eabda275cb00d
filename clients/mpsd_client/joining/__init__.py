"""How a program joins a domain: its GPUs by every name, its protection level, its environment variables."""
