"""Fourth floor: from corpora to a model, with Lightning."""
