"""The backends without kernels of their own: the oracle, XLA and torch. Each is registered by an entry point."""
