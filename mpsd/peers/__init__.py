"""The daemon's Unix sockets: credentials and rights of peers, requests, limits per user."""

from mpsd.peers.credentials import Peer
from mpsd.peers.listener import History, Limits, Listener
from mpsd.peers.requests import Handler

__all__ = ["Handler", "History", "Limits", "Listener", "Peer"]
