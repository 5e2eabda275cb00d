"""A small LLM server with continuous batching, and its models."""
