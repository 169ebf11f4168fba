"""The services of a run: where a rank finds its own, and who starts them."""
