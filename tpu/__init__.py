"""The TPU backend: tile-grouped Pallas kernels (imported as ``portable_gdn.tpu``)."""
