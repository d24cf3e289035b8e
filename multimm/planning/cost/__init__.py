"""What a layout costs: bytes moved, memory held, seconds. Pure functions of the layout."""
