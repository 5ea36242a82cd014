"""Serving: a pool of states, and calls on ragged batches that update it (``spec/slots.py`` says what that means)."""
