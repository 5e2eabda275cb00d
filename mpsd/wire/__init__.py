"""The protocol between mpsd and its clients. No sockets, no clock, the standard library alone.

Layers, each pure: zmtp (bytes <-> frames), codec (frames <-> messages), session (which message may
come when), messages (what can be said: the table of operations).

Imports in this package are relative, so that the client library can carry a copy of it.
"""
