"""Draft lengths by policies of the literature."""
