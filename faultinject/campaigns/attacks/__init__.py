"""Attacks of a second user on the clients, domains and sockets of a first one."""
