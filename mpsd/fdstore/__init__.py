"""Descriptors that outlive the daemon: systemd's descriptor store, or a keeper process."""
