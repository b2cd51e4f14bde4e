"""The model: attention, MLP, experts, loss, and layers as a loop or unrolled."""
