"""Measurements on a real GPU that the design rests on: `python -m faultinject.measure --out DIR`."""
