"""Programs without and with the proxy: the same results, the same speed, the same memory, no leaks."""
