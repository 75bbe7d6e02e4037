"""Third floor: from posteriors to text. Search, long recordings, the recogniser."""
