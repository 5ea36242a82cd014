"""The proof: cases, recordings of real activations, and the comparison of every backend with the oracle."""
