"""The kernels of what lies behind the rule: the cotangents of a mixer's output norm and gate."""
