"""What may be read from a file of unknown origin: regular files only, pickles without running code, with bounds."""
