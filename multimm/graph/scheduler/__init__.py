"""What the scheduler and workers do for a product: place, pin, prefetch, replace lost workers."""
