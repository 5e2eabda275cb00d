"""Build of libcuda.so.1, the proxy, and of its stand-in driver. Needs gcc, pycparser and a cuda.h.

header.py reads the functions of cuda.h, table.py reads functions.toml and names.txt, emit.py writes the
generated sources, and compile.py runs the compiler. No text of cuda.h enters the repository.
"""
