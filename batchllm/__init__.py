"""Offline batch engine for language models: plans the whole batch, then runs it as fast as the machine allows."""

__version__ = "0.1.0"
