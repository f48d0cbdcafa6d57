"""Costs of stages: time and memory of layers, edges and all-reduces of gradients, and the step of a candidate."""
