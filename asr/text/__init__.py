"""Ground floor: what text is to the model. Normalisers and tokenizers."""
