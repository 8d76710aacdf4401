"""The status page: what the pair's services say about themselves, sampled while somebody looks."""
