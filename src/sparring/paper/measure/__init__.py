"""What is measured for an item of the paper, one module per kind of measurement."""
