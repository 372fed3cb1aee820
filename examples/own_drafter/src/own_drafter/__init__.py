"""A drafter for specsot that needs no model: it drafts what followed the last token before."""
