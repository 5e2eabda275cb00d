"""Stand-ins for nvidia-cuda-mps-control and nvidia-cuda-mps-server."""
