"""The status page: measurements of the pair's services, sampled while the page is open somewhere."""
