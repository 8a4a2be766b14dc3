"""The tensors in a process of their own: if it dies, it is started anew, and all requests go on with the same tokens."""
