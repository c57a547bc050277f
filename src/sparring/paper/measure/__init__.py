"""The measurements behind the paper's items, one module per kind."""
