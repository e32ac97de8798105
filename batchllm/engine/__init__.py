"""The engine: scheduler, KV blocks, steps, sampling."""
