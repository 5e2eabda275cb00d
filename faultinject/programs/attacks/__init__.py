"""The acts of a local user who attacks mpsd: single attempts and floods, on paths and sockets of a node."""
