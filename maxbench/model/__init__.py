"""What is computed: blocks, attention, experts, loss, number formats."""
