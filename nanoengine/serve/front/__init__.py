"""One server of several models: a front without torch, and a process for each loaded model."""
