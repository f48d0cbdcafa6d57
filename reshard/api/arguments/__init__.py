"""The arguments of a call on one rank: options, their checks, and the arrays of its tensors."""
