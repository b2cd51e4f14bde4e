"""Published and measured step times, and how far predictions are from them."""
