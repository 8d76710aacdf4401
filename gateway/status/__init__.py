"""The status page: figures of the pair's services, sampled while somebody watches."""
