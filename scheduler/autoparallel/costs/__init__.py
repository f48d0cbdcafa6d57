"""What stages cost: the time and memory of layers, edges and sums of gradients, and the step of a candidate."""
