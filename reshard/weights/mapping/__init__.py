"""Mappings from parts of source tensors to parts of destination tensors: rules, and families of models."""
