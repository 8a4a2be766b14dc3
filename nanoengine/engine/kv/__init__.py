"""The KV cache as the policy sees it: ids, counts and prefixes, no tensors."""
