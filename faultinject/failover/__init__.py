"""Faults that nothing isolates, one after another, into the same programs, which go on in a second domain."""
