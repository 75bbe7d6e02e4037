"""Ground floor: from audio to features. Reading, log-mel, augmentation."""
