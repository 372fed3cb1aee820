"""The pictures of docs/concepts.md, drawn from real runs: `python -m tools.pictures.draw`."""
