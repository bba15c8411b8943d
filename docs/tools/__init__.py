"""Makes the documentation: pages, links, code blocks, the reference, transcripts, the site."""
