"""The algorithm, once: names and rules, the oracle, the stages, what may be rounded. Imports nothing above it."""
