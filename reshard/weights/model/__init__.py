"""The shards of a model on its ranks, the pieces that go from one model to another, and the digests that prove them."""
