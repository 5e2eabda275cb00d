"""Faults that mpsd cannot isolate, one after another, beside the same programs, which fail over."""
