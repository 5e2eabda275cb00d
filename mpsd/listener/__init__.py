"""The daemon's socket: who asks, may they, and what they are told."""

from mpsd.listener.peers import Peer
from mpsd.listener.requests import Handler
from mpsd.listener.server import History, Limits, Listener

__all__ = ["Handler", "History", "Limits", "Listener", "Peer"]
