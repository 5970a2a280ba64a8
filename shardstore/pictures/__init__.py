"""Bytes to pixels: headers, decoding, a JPEG's first rows."""
