"""More than one process: ranks that share a model, replicas, Ray."""
