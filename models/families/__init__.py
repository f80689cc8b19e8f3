"""One file per family: how it differs from what most decoders of transformers do."""
