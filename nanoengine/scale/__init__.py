"""Several processes: ranks of one model, replicas, Ray."""
