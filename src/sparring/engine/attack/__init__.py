"""PGD-K-tau on the GPU: captured steps over an active set that shrinks."""
