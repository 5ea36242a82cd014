"""The definition of the algorithm: operands and rules, oracle, stages and roundings. It imports no other subpackage."""
