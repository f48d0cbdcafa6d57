"""Steps of a call before its transfer: the ranks agree on their arguments, then on a plan."""
