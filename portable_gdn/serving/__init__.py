"""Serving: a pool of states, and calls with ragged batches that update it; ``spec/slots.py`` defines their meaning."""
