"""Cut a whole model into stages, find what they exchange, and give them their values.

May import ``runtime`` and the packages below it, but not the rest of ``pipe``.
"""
