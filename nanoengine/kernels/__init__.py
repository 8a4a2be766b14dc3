"""The operations of a transformer's layers but attention: one protocol, a reference in torch, and native ones for the CPU."""
