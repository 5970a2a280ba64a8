"""What is on disk and how it is read: bytes of files, codecs, the index, chunk numbers to arrays."""
