"""Who computes which block, and who keeps the operands' blocks."""
