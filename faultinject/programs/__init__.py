"""The worker programs: each is a process of its own that exchanges JSON lines with the rig."""
