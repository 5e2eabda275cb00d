"""Many clients of one user, a few of them at fail-over: how long the GPU stands still at a trap."""
