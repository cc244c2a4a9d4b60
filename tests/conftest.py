"""What all tests share lies next to this file: pytest makes this folder importable because of it."""
