"""The worker programs: each runs as a process of its own and talks JSON lines with the rig."""
