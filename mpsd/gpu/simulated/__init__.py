"""A simulated GPU node: real processes, real descriptors over real sockets, memory in memfds.

    gpu       the one long-lived process that is "the GPU" and its driver (python -m mpsd.gpu.simulated gpu)
    machine   what that process decides: spaces, kernels, faults (no sockets, an explicit clock)
    semantics who dies of what and when, as measured on a real GPU
    control   stand-in for nvidia-cuda-mps-control; server: for nvidia-cuda-mps-server
    client    the SDK that programs use instead of CUDA
    adapters  mpsd.gpu.base over the node; backend: open_simulated(), stop_simulated()

Nothing is imported here: the stand-ins and clients must start fast.
"""
