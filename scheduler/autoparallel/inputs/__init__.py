"""Inputs of a search: the layers of a model, their measured times, the devices, and the choices of a stage."""
