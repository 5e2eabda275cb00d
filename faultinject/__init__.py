"""The fault-injection harness: inject faults beside clients of MPS, and judge what happens to them.

Packages, from the bottom up: registry (what can be injected, and what must hold), evidence (reports),
programs (the client processes), rig (the node, the service, the course of a run), campaigns (what the command
runs).
"""
