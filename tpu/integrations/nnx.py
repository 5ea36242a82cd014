"""The old name of ``portable_gdn.layers``."""

from portable_gdn.renamed import moved

__getattr__ = moved("portable_gdn.tpu.integrations.nnx", "portable_gdn.layers")
