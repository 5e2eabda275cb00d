"""A simulated GPU node: real processes, real descriptors over real sockets, memory in memfds.

    gpu       the long-lived process that acts as GPU and driver (python -m mpsd.gpu.simulated gpu)
    machine   decisions of that process: spaces, kernels, faults (no sockets, an explicit clock)
    semantics effects and times of faults, as measured on a real GPU
    control   stand-in for nvidia-cuda-mps-control; server: for nvidia-cuda-mps-server
    client    the SDK that programs use instead of CUDA
    adapters  mpsd.gpu.base over the node; backend: open_simulated(), stop_simulated()

Files of a pipe directory have the stock modes: the FIFO `log` 0777, `control` 0666, `control_lock` and the
pid file 0666, `control_privileged` 0755 of root. A line in the FIFO silences that log for good, and a client
that may not enter the directory runs outside MPS without an error (mps.controldaemon, client).

This package imports nothing, because stand-ins and clients must start fast.
"""
