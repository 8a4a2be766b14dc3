"""Worker processes, which hold the tensors: a lost process is replaced, and requests go on with the same tokens."""
