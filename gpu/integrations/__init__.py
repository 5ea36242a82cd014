"""The old name of ``portable_gdn.integrations``."""

from portable_gdn.renamed import moved

__getattr__ = moved("portable_gdn.gpu.integrations", "portable_gdn.integrations")
