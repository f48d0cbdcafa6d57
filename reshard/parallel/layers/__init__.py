"""Layers whose parameters and activations are cut over a grid."""
