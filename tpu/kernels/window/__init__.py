"""Tokens step by step on states in a pool: what serving does with single tokens and with windows of drafts."""
