"""Programs without and with mpsd's libcuda: the same results, the same speed, the same memory, no leaks."""
