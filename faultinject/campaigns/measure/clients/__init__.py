"""The client processes of the measurements."""
