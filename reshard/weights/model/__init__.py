"""What ranks hold of a model, the pieces that go from one to another, and the digests that prove them."""
