"""Backends that need no kernel of their own: the oracle, XLA, torch. Each is registered by an entry point."""
