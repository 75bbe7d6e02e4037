"""Fourth floor: from corpora to a model, on Lightning."""
