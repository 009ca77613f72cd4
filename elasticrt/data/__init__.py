"""Which samples a rank trains: order, samplers, position, and data that one rank prepares for all."""
