"""What runs on workers beside tasks: warm-up, transport, counters, memory of lost peers."""
