"""An LLM server beside faults: it fails over with its requests, or restarts."""
