"""EAGLE-1 for specsot: a head on the target's features drafts a static token tree."""
