"""The protocol between mpsd and its clients. No sockets, no clock, the standard library alone.

Layers, all pure: zmtp (bytes <-> frames), codec (frames <-> messages), session (order of messages),
messages (message types and the table of operations).

Imports in this package are relative, so that the client library can include a copy of it.
"""
