"""More than one process: a worker, ranks that share a model, replicas, Ray."""
