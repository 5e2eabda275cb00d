"""The common parts of worker programs: messages to the rig, child processes, statistics of the proxy."""
