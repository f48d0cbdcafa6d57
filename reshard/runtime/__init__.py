"""One rank's program, and the executors that run it: on the CPU, on a GPU, or in rounds of grouped messages.

May import :mod:`reshard.plan` and the packages below it. Modules directly in this folder do not import torch, except
:mod:`~reshard.runtime.transport`.
"""
