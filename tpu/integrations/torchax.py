"""The old name of ``portable_gdn.integrations.torchax``."""

from portable_gdn.renamed import moved

__getattr__ = moved("portable_gdn.tpu.integrations.torchax", "portable_gdn.integrations.torchax")
