"""A small LLM server with continuous batching, beside faults: moved with its requests, or started anew."""
