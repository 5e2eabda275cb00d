"""The stock MPS binaries: control daemons and servers of a domain, their answers and their logs."""
