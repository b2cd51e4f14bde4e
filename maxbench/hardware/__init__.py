"""GPUs and clusters as data, and the figures that others published for them."""
