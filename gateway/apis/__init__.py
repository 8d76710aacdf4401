"""The generating endpoints. Each describes by an Api how it reads a request and writes the answer."""
