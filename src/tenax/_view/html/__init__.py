"""Pages: each is one file that needs no other, no network and no program but a browser. Pure: values in, text out."""
