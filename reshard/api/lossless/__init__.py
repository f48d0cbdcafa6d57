"""Lossless codecs whose output has no fixed size: tensors travel as buckets of bytes whose sizes the ranks agree on."""
