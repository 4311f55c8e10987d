"""Who drafts how many tokens, by what it costs and how often it is accepted."""
