"""Models: configuration, decoder, loaders, tokenizers."""
