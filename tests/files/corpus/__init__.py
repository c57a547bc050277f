"""Damaged and hostile files for every reader, made by code from a seed.

`python -m tests.files.corpus FOLDER` forks one process per reader, limits its memory, reads each case and prints one
line of JSON per case. A case must be read, or refused by a UserError of one line.
"""
