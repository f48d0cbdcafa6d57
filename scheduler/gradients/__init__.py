"""Gradients of a training step of a pipeline: over replicas, between stages that share parameters, and their norm.

Also the reading of parameters and gradients that torch's DDP, FSDP and tensor parallelism hold. May import everything
in ``reshard``, and ``ir``, ``simulation``, ``passes`` and the modules at the top of ``reshard.scheduler``.
"""
