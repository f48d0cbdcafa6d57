"""Costs of transfers between stages: edges, and sums of the gradients of parameters that stages share."""
