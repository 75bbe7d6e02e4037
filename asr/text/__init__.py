"""Ground floor: text as the model sees it. Normalisers and tokenizers."""
