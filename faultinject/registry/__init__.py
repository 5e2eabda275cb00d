"""Fault kinds, faults, histories and laws: faults to inject, their outcome in a run, and its limits."""
