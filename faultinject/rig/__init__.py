"""One run: the node, the service under test, the worker programs, and the course of each story."""
