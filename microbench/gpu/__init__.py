"""Times of transfers, the engine and codecs on one GPU, which several ranks share."""
