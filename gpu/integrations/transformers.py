"""The old name of ``portable_gdn.integrations.transformers``."""

from portable_gdn.renamed import moved

__getattr__ = moved("portable_gdn.gpu.integrations.transformers", "portable_gdn.integrations.transformers")
