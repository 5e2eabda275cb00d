"""The GPU of the worker programs: real, simulated, or the stand-in driver."""
