"""Ground floor: sound becomes features. Reading, log-mel, augmentation."""
