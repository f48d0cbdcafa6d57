"""Transfers with lossless codecs: tensors travel as buckets of bytes, whose sizes the ranks agree on.

:mod:`~reshard.api.lossless.lossless_call` runs one call, :mod:`~reshard.api.lossless.lossless_mover` the transfers of a
Mover, and :mod:`~reshard.api.lossless.local_buckets` those of one process. The other modules are below them.
"""
