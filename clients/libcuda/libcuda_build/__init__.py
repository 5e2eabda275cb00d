"""Builds libcuda.so.1, the proxy, and its stand-in driver: needs gcc, pycparser and a cuda.h.

header.py reads the functions of cuda.h, table.py the files functions.toml and names.txt, emit.py writes
the generated sources and compile.py runs the compiler. Nothing of cuda.h ends up in the repository.
"""
