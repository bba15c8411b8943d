"""Scripts of the documentation: links, code blocks, generated pages, transcripts, screenshots, hooks of the site."""
