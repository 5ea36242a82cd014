"""What joins other libraries on a TPU to our call: ``nnx`` has layers for Flax, ``torchax`` takes torch tensors."""
