"""APIs: the interfaces of other servers; one file or folder each, beside what they have in common."""
