"""What stages pay for what they send each other: edges, and sums of the gradients of parameters that they share."""
