"""Measurements on a GPU that the design rests on: `python -m faultinject.campaigns.measure --out DIR`."""
