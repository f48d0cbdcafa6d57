"""Cut a whole model into stages, find the tensors that they exchange, and initialize their parameters.

May import ``runtime`` and the packages below it, but not the rest of ``model_stages``.
"""
