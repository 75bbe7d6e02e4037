"""Second floor: the Transformer encoder-decoder, each part public."""
