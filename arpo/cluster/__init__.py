"""Training on a Ray cluster: sampling in other processes, on other machines."""
